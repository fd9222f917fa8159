"""Shape of a tiny model: the reported attention, few layers, no weights.

Scheduling, caching, workspaces and graphs depend on the attention and the kinds of layers, not on
the weights. `vllm_repro.releases.tiny_model_folder` makes the model's folder.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

Family = Literal["qwen3", "llama", "gemma3", "mimo", "deepseek_v4", "blip2", "granite_hybrid"]
"""Model code of vLLM.

"mimo" drafts, "deepseek_v4" has compressed layers, "blip2" reads images, and "granite_hybrid" has
Mamba layers.
"""

FAMILIES: tuple[Family, ...] = get_args(Family)

Kind = Literal["full", "sliding", "sparse", "compressed", "mamba"]
"""Attention of a layer.

- full: all tokens
- sliding: a window
- sparse: a window and the best groups of 4 tokens
- compressed: a window and all groups of 128 tokens
- mamba: a state
"""

_KINDS: dict[Family, frozenset[Kind]] = {
    "qwen3": frozenset({"full"}),
    "llama": frozenset({"full"}),
    "gemma3": frozenset({"full", "sliding"}),
    "mimo": frozenset({"full"}),
    "deepseek_v4": frozenset({"sliding", "sparse", "compressed"}),
    "blip2": frozenset({"full"}),
    "granite_hybrid": frozenset({"full", "mamba"}),
}
_FP8_WIDTH = 4096
SMALLEST_VOCABULARY = 265
"""Fewest token ids: the 256 bytes, and those of `tiny_tokenizer.added_tokens(image=True)`."""
_DRAFTERS = frozenset({"mimo", "deepseek_v4"})


@dataclass(frozen=True)
class TinyModel:
    """Shape of a tiny model: few layers, and random weights in place of trained ones.

    Sizes are numbers of elements, lengths are in tokens. Raises `ValueError` for a shape that no
    model has.
    """

    family: Family = "qwen3"
    # attention of each layer
    kinds: tuple[Kind, ...] = ("full", "full")
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    # attention window of gemma3's sliding layers, and of all layers of deepseek_v4
    window: int | None = None
    # number of draft layers (`--speculative-config` with the method "mtp")
    drafts: int = 0
    # hidden size, default heads x head_dim; a small one makes wide attention cheap
    hidden: int | None = None
    # number of token ids: those up to about 9,500 decode to text, larger ones to nothing
    vocab: int = 4096
    max_position: int = 32768
    # 8-bit weights, and the inner sizes that their kernels need, as vLLM's DeepSeek-V4 on GPUs
    fp8: bool = False

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(
                f"no tiny model of family {self.family!r}; there are {', '.join(FAMILIES)}"
            )
        sizes = (
            len(self.kinds),
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.width,
            self.vocab,
            self.max_position,
        )
        if min(*sizes, 1 if self.window is None else self.window) < 1 or self.drafts < 0:
            raise ValueError("layers, heads, sizes and lengths count from 1")
        if self.vocab < SMALLEST_VOCABULARY:
            raise ValueError(
                f"a byte-level tokenizer needs at least {SMALLEST_VOCABULARY} tokens, not"
                f" {self.vocab}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly"
            )
        if strange := sorted(set(self.kinds) - _KINDS[self.family]):
            raise ValueError(
                f"{self.family} has no {strange[0]} layers, only"
                f" {', '.join(sorted(_KINDS[self.family]))}"
            )
        if ("sliding" in _KINDS[self.family]) != (self.window is not None):
            raise ValueError("window=… goes with sliding layers, and they with it")
        if self.drafts and self.family not in _DRAFTERS:
            raise ValueError(
                f"vLLM has no drafter for {self.family}, only for {', '.join(sorted(_DRAFTERS))}"
            )
        if self.fp8 and self.family != "deepseek_v4":
            raise ValueError("fp8=… is for deepseek_v4, which has no other weights on a GPU")

    @property
    def layers(self) -> int:
        """Number of layers without draft layers."""
        return len(self.kinds)

    @property
    def width(self) -> int:
        """Hidden size: `hidden`, or heads x head_dim without it; always 4,096 with `fp8`.

        The family "mimo" ignores `hidden`: vLLM derives its head size from the hidden size.
        """
        if self.fp8:
            return _FP8_WIDTH
        own = self.hidden if self.family != "mimo" else None
        return self.heads * self.head_dim if own is None else own

    @property
    def slug(self) -> str:
        """Name for the model's folder, different for each shape."""
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:8]
        return f"{self.family}-{self.layers}x{self.heads}x{self.kv_heads}x{self.head_dim}-{digest}"

    def __str__(self) -> str:
        layers = f"{self.layers} layer" + ("s" if self.layers > 1 else "")
        if set(self.kinds) != {"full"}:
            window = f", with a window of {self.window} tokens" if self.window else ""
            layers += f" ({' then '.join(self.kinds)} attention{window})"
        if self.drafts:
            layers += f" and {self.drafts} that draft" + ("s" if self.drafts == 1 else "")
        heads = f"{self.kv_heads} KV head" + ("s" if self.kv_heads > 1 else "")
        vocabulary = "" if self.vocab == TinyModel.vocab else f", {self.vocab:,} token ids"
        return f"{layers}, {self.heads} heads, {heads} of {self.head_dim}{vocabulary}"
