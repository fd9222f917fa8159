"""Random weights for a tiny model whose answers are compared, scaled so that each token depends on all tokens before it.

vLLM's dummy weights are tiny and nearly equal: the output does not depend on the prompt, and the two best tokens tie to four digits.
Here attention output is large compared with the embedding, so that the context decides the output of a layer. The last layer spreads
the logits over several nats, so that one token is clearly the best. The file is identical on every machine.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator
from math import sqrt

from vllm_repro.tiny_model import TinyModel

__all__ = ["Tensor", "safetensors", "tensors"]

_SEED = 7
_ONE = b"\x80\x3f"  # 1.0 in bfloat16
_EMBEDDING = 0.05
_ATTENTION = 2.0
_SCORES = 8.0

Tensor = tuple[str, tuple[int, ...], bytes]
"""Name, shape, and content as little-endian bfloat16 bytes."""


def tensors(model: TinyModel, intermediate: int) -> Iterator[Tensor]:
    """Yield every tensor of a `mimo` and its draft layers. intermediate: width inside the feed-forward layers.

    Raises `ValueError` for another family.
    """
    if model.family != "mimo":
        raise ValueError(f"weights can be made for mimo only, not for {model.family}")
    source = random.Random(_SEED)
    width = model.width

    def matrix(name: str, rows: int, columns: int, scale: float) -> Tensor:
        return name, (rows, columns), _bfloat16(source, rows * columns, scale)

    yield matrix("model.embed_tokens.weight", model.vocab, width, _EMBEDDING)
    yield matrix("lm_head.weight", model.vocab, width, _SCORES / sqrt(width))
    yield _ones("model.norm.weight", width)
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    projections = (("q", queries, width), ("k", keys, width), ("v", keys, width), ("o", width, queries))
    feed_forward = (("gate", intermediate, width), ("up", intermediate, width), ("down", width, intermediate))
    drafters = [f"model.mtp_layers.{index}" for index in range(model.drafts)]
    for layer in (*(f"model.layers.{index}" for index in range(model.layers)), *drafters):
        for name, rows, columns in projections:
            yield matrix(f"{layer}.self_attn.{name}_proj.weight", rows, columns, _ATTENTION / sqrt(columns))
            if name != "o":
                yield f"{layer}.self_attn.{name}_proj.bias", (rows,), bytes(2 * rows)
        for name, rows, columns in feed_forward:
            yield matrix(f"{layer}.mlp.{name}_proj.weight", rows, columns, 1 / sqrt(columns))
        yield _ones(f"{layer}.input_layernorm.weight", width)
        yield _ones(f"{layer}.post_attention_layernorm.weight", width)
    for layer in drafters:
        yield matrix(f"{layer}.input_proj.weight", width, 2 * width, 1 / sqrt(2 * width))
        for name in ("token", "hidden", "final"):
            yield _ones(f"{layer}.{name}_layernorm.weight", width)


def safetensors(model: TinyModel, intermediate: int) -> bytes:
    """Return the content of `model.safetensors`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    contents: list[bytes] = []
    at = 0
    for name, shape, content in tensors(model, intermediate):
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (at, at + len(content))}
        contents.append(content)
        at += len(content)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return b"".join((len(encoded).to_bytes(8, "little"), encoded, *contents))


def _ones(name: str, count: int) -> Tensor:
    return name, (count,), _ONE * count


def _bfloat16(source: random.Random, count: int, scale: float) -> bytes:
    """Return normally distributed numbers as bytes. bfloat16 is the upper half of a float32."""
    wide = array("f", (source.gauss(0.0, scale) for _ in range(count))).tobytes()
    narrow = bytearray(2 * count)
    narrow[0::2], narrow[1::2] = wide[2::4], wide[3::4]
    return bytes(narrow)
