"""Random weights for a tiny model whose answers are compared.

Their scale makes each token depend on all tokens before it.

vLLM's dummy weights are tiny and nearly equal: the output does not depend on the prompt, and the
two best tokens tie to four digits. Here attention output is large compared with the embedding, so
that the context decides the output of a layer. The last layer spreads the logits over several nats,
so that one token is clearly the best. The file is identical on every machine.

A tied model has its embedding as the last layer: the norm before it spreads the logits. Gemma adds
1 to the weights of its norms, scales the embedding by the root of the width, and normalizes the
attention output.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator
from math import sqrt

from vllm_repro.tiny_model import Family, TinyModel

FAMILIES: frozenset[Family] = frozenset({"mimo", "qwen3", "llama", "gemma3"})
"""Families of which weights can be made."""

_SEED = 7
_EMBEDDING = 0.05
_ATTENTION = 2.0
_SCORES = 8.0

Tensor = tuple[str, tuple[int, ...], bytes]
"""Name, shape, and content as little-endian bfloat16 bytes."""


def tensors(model: TinyModel, intermediate: int) -> Iterator[Tensor]:
    """Yield name, shape and random content of every tensor of a tiny model and its draft layers.

    intermediate: width inside the feed-forward layers.

    Raises `ValueError` for a family that is not in `FAMILIES`.
    """
    if model.family not in FAMILIES:
        raise ValueError(
            f"weights can be made for {', '.join(sorted(FAMILIES))}, not for {model.family}"
        )
    gemma, tied = model.family == "gemma3", model.family != "mimo"
    source = random.Random(_SEED)
    width = model.width

    def matrix(name: str, rows: int, columns: int, scale: float) -> Tensor:
        return name, (rows, columns), _bfloat16(source, rows * columns, scale)

    embedding = _EMBEDDING / sqrt(width) if gemma else _EMBEDDING

    def norm(name: str, count: int, scale: float = 1.0) -> Tensor:
        return name, (count,), _narrow(array("f", [scale - 1 if gemma else scale] * count))

    yield matrix("model.embed_tokens.weight", model.vocab, width, embedding)
    if not tied:
        yield matrix("lm_head.weight", model.vocab, width, _SCORES / sqrt(width))
    yield norm("model.norm.weight", width, _SCORES / (embedding * sqrt(width)) if tied else 1.0)
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    projections = (
        ("q", queries, width),
        ("k", keys, width),
        ("v", keys, width),
        ("o", width, queries),
    )
    feed_forward = (
        ("gate", intermediate, width),
        ("up", intermediate, width),
        ("down", width, intermediate),
    )
    drafters = [f"model.mtp_layers.{index}" for index in range(model.drafts)]
    for layer in (*(f"model.layers.{index}" for index in range(model.layers)), *drafters):
        for name, rows, columns in projections:
            yield matrix(
                f"{layer}.self_attn.{name}_proj.weight", rows, columns, _ATTENTION / sqrt(columns)
            )
            if name in ("q", "k") and model.family in ("qwen3", "gemma3"):
                yield norm(f"{layer}.self_attn.{name}_norm.weight", model.head_dim, _ATTENTION)
            if name != "o" and not tied:
                yield f"{layer}.self_attn.{name}_proj.bias", (rows,), bytes(2 * rows)
        for name, rows, columns in feed_forward:
            yield matrix(f"{layer}.mlp.{name}_proj.weight", rows, columns, 1 / sqrt(columns))
        norms = (
            ("input", "post_attention", "pre_feedforward", "post_feedforward")
            if gemma
            else ("input", "post_attention")
        )
        for name in norms:
            yield norm(f"{layer}.{name}_layernorm.weight", width)
    for layer in drafters:
        yield matrix(f"{layer}.input_proj.weight", width, 2 * width, 1 / sqrt(2 * width))
        for name in ("token", "hidden", "final"):
            yield norm(f"{layer}.{name}_layernorm.weight", width)


def safetensors(model: TinyModel, intermediate: int) -> bytes:
    """Return the content of `model.safetensors` for a tiny model with random weights.

    The arguments and errors are those of `tensors`.
    """
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


def _bfloat16(source: random.Random, count: int, scale: float) -> bytes:
    """Return `count` normally distributed random numbers as bfloat16 bytes.

    scale: their standard deviation.
    """
    return _narrow(array("f", (source.gauss(0.0, scale) for _ in range(count))))


def _narrow(numbers: array[float]) -> bytes:
    """Return float32 numbers as bfloat16 bytes, the upper half of each."""
    wide = numbers.tobytes()
    narrow = bytearray(2 * len(numbers))
    narrow[0::2], narrow[1::2] = wide[2::4], wide[3::4]
    return bytes(narrow)
