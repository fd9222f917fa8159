"""Made weights: valid safetensors, reproducible, with the documented shapes and scales."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from math import sqrt
from statistics import fmean, pstdev

import pytest

from vllm_repro.releases.weights import safetensors, tensors
from vllm_repro.tiny_model import Family, TinyModel

MODEL = TinyModel("mimo", ("full",), heads=4, kv_heads=2, head_dim=16, drafts=1, vocab=265)


def numbers(content: bytes) -> list[float]:
    return [
        struct.unpack("<f", b"\0\0" + content[at : at + 2])[0] for at in range(0, len(content), 2)
    ]


def test_the_file_is_valid_safetensors() -> None:
    content = safetensors(MODEL, 32)
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert size % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    ends = [0]
    for entry in header.values():
        first, last = entry["data_offsets"]
        count = entry["shape"][0] * (entry["shape"][1] if len(entry["shape"]) > 1 else 1)
        assert (first, last - first, entry["dtype"]) == (ends[-1], 2 * count, "BF16")
        ends.append(last)
    assert len(content) == 8 + size + ends[-1]
    assert header["model.layers.0.self_attn.k_proj.weight"]["shape"] == [32, 64]
    assert header["model.mtp_layers.0.input_proj.weight"]["shape"] == [64, 128]
    assert content == safetensors(MODEL, 32)


def test_weights_have_the_documented_scales() -> None:
    found = {name: numbers(content) for name, _, content in tensors(MODEL, 32)}
    assert set(found["model.norm.weight"]) == {1.0}
    for name, scale in (
        ("model.embed_tokens", 0.05),
        ("model.layers.0.self_attn.v_proj", 2 / sqrt(64)),
        ("lm_head", 8 / sqrt(64)),
    ):
        values = found[f"{name}.weight"]
        assert pstdev(values) == pytest.approx(scale, rel=0.05)
        assert abs(fmean(values)) < scale / 10


def test_other_families_have_none() -> None:
    kinds, sizes = ("sliding", "sparse", "compressed"), {"heads": 4, "kv_heads": 1, "head_dim": 64}
    with pytest.raises(ValueError, match="not for deepseek_v4"):
        # sizes by name
        list(tensors(TinyModel("deepseek_v4", kinds, window=8, **sizes), 32))  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3"])
def test_the_norm_before_a_tied_last_layer_spreads_the_logits(family: Family) -> None:
    window = 8 if family == "gemma3" else None
    model = replace(MODEL, family=family, window=window, drafts=0)
    found = {name: numbers(content) for name, _, content in tensors(model, 32)}
    embedding, norm = pstdev(found["model.embed_tokens.weight"]), found["model.norm.weight"][0]
    added = 1 if family == "gemma3" else 0
    assert (norm + added) * embedding * sqrt(64) == pytest.approx(8, rel=0.05)
    assert embedding * (sqrt(64) if family == "gemma3" else 1) == pytest.approx(0.05, rel=0.05)
    assert "lm_head.weight" not in found
    layer = {name.removeprefix("model.layers.0.") for name in found if "layers" in name}
    assert ("self_attn.q_norm.weight" in layer) is (family != "llama")
    assert ("post_feedforward_layernorm.weight" in layer) is (family == "gemma3")
    assert not any(name.endswith("bias") for name in layer)
