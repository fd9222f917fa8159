"""Tiny model folders: complete and reproducible, with a lossless tokenizer."""

from __future__ import annotations

import itertools
import json
import os
import struct
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro.releases.families import model_config
from vllm_repro.releases.tiny_model_folder import cached_model, make_tiny_model
from vllm_repro.releases.tiny_tokenizer import (
    MARKERS,
    SPECIAL_TOKENS,
    byte_alphabet,
    tokenizer_json,
)
from vllm_repro.releases.weights import safetensors, tensors
from vllm_repro.tiny_model import Family, TinyModel

MODELS = [
    TinyModel(),
    TinyModel("llama"),
    TinyModel("gemma3", ("full", "sliding"), window=128),
    TinyModel("mimo", ("full",), heads=24, kv_heads=4, head_dim=256, drafts=1),
    TinyModel(
        "deepseek_v4",
        ("sliding", "sparse", "compressed", "sparse"),
        8,
        1,
        512,
        window=128,
        hidden=256,
    ),
    TinyModel("blip2"),
    TinyModel("granite_hybrid", ("mamba", "full")),
]
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.family)
def test_a_folder_holds_what_a_server_reads_and_nothing_else(
    tmp_path: Path, model: TinyModel
) -> None:
    folder = make_tiny_model(tmp_path / "model", model)
    images = (
        ["preprocessor_config.json", "processor_config.json"] if model.family == "blip2" else []
    )
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, *images])
    config, tokenizer = read(folder, "config.json"), read(folder, "tokenizer.json")
    assert len(tokenizer["model"]["vocab"]) == config["vocab_size"] == 4096
    assert (
        read(folder, "tokenizer_config.json")["eos_token"] == SPECIAL_TOKENS[config["eos_token_id"]]
    )


def test_a_model_that_reads_images_has_a_token_for_them(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", TinyModel("blip2", vocab=300))
    config, vocab = read(folder, "config.json"), read(folder, "tokenizer.json")["model"]["vocab"]
    text = config["text_config"]
    assert vocab["<image>"] == config["image_token_index"]
    assert len(vocab) == text["vocab_size"] == 300
    assert (text["architectures"], text["model_type"]) == (["LlamaForCausalLM"], "llama")


def test_a_model_with_weights_is_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path))
    model = TinyModel("mimo", ("full",), heads=2, kv_heads=1, head_dim=8, drafts=1, vocab=4096)
    plain, weighed = cached_model(model), cached_model(model, weights=True)
    assert plain != weighed
    assert sorted(path.name for path in plain.iterdir()) == FILES
    written = (weighed / "model.safetensors").stat()
    assert cached_model(model, weights=True) == weighed
    assert (weighed / "model.safetensors").stat().st_mtime_ns == written.st_mtime_ns


def test_the_same_bytes_every_time_and_nothing_rewritten(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "a", TinyModel())
    again = make_tiny_model(tmp_path / "b", TinyModel())
    assert [(folder / name).read_bytes() for name in FILES] == [
        (again / name).read_bytes() for name in FILES
    ]
    for name in FILES:
        os.utime(folder / name, ns=(1, 1))
    (folder / "config.json").write_text("{}")
    make_tiny_model(folder, TinyModel())
    assert read(folder, "config.json")["vocab_size"] == 4096
    assert [(folder / name).stat().st_mtime_ns for name in FILES[1:]] == [1, 1, 1]


LLAMA = TinyModel(
    "llama", ("full",) * 3, heads=8, kv_heads=4, head_dim=64, vocab=300, max_position=100
)


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        (
            LLAMA,
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 512,
                "vocab_size": 300,
                "num_key_value_heads": 4,
                "max_position_embeddings": 100,
            },
        ),
        (
            TinyModel("gemma3", ("full", "sliding"), window=128),
            {
                "layer_types": ["full_attention", "sliding_attention"],
                "num_hidden_layers": 2,
                "sliding_window": 128,
            },
        ),
        (
            TinyModel("mimo", ("full",), 24, 4, 256, drafts=1, hidden=256),
            {
                "architectures": ["MiMoForCausalLM"],
                "model_type": "qwen2",
                "num_nextn_predict_layers": 1,
                "head_dim": 256,
                "hidden_size": 24 * 256,
                "num_attention_heads": 24,
            },
        ),
        (
            MODELS[4],
            {
                "compress_ratios": [0, 4, 128, 4],
                "head_dim": 512,
                "sliding_window": 128,
                "index_head_dim": 128,
                "index_topk": 512,
                "qk_rope_head_dim": 64,
            },
        ),
    ],
)
def test_a_config_has_the_shape_of_its_model(model: TinyModel, fields: dict[str, object]) -> None:
    config = model_config(model)
    assert {name: config[name] for name in fields} == fields


def test_a_deepseek_v4_on_a_gpu_keeps_the_sizes_of_its_workspace() -> None:
    config, on_gpu = model_config(MODELS[4]), model_config(replace(MODELS[4], fp8=True))
    assert "quantization_config" not in config
    assert on_gpu["quantization_config"]["scale_fmt"] == "ue8m0"
    other = {"hidden_size", "q_lora_rank", "o_lora_rank", "o_groups", "index_n_heads"}
    changed = {key for key in config if on_gpu[key] != config[key]}
    assert changed == {*other, "moe_intermediate_size"}


@pytest.mark.parametrize("vocab", [265, 600, 20000])
def test_every_merge_joins_two_tokens_into_a_third(vocab: int) -> None:
    model = tokenizer_json(vocab)["model"]
    tokens = model["vocab"]
    assert sorted(tokens.values()) == list(range(len(tokens)))
    assert len(tokens) <= vocab
    merged = set()
    for merge in model["merges"]:
        left, right = merge.split(" ")
        assert {left, right, left + right} <= tokens.keys()
        merged.add(left + right)
    assert len(merged) == len(model["merges"])
    assert len(tokens) == 264 + len(merged)


def test_ids_and_bytes() -> None:
    assert [token["content"] for token in TOKENIZER["added_tokens"]] == [*SPECIAL_TOKENS, *MARKERS]
    assert [TOKENIZER["model"]["vocab"][token] for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    alphabet = byte_alphabet()
    assert len(set(alphabet)) == 256
    assert (alphabet[ord("a")], alphabet[ord(" ")], alphabet[ord("\n")]) == ("a", "Ġ", "Ċ")


def encode(text: str, tokenizer: dict[str, Any]) -> list[int]:
    """Encode `text` by byte-level BPE, without the split into words, which only prevents merges."""
    ranks = {
        tuple(merge.split(" ")): rank for rank, merge in enumerate(tokenizer["model"]["merges"])
    }
    parts = [byte_alphabet()[byte] for byte in text.encode()]
    while True:
        best = min(
            (
                (ranks[pair], index)
                for index, pair in enumerate(itertools.pairwise(parts))
                if pair in ranks
            ),
            default=None,
        )
        if best is None:
            return [tokenizer["model"]["vocab"][part] for part in parts]
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]


def decode(ids: list[int], tokenizer: dict[str, Any]) -> str:
    tokens = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
    return bytes(byte_of[character] for number in ids for character in tokens[number]).decode()


TOKENIZER = tokenizer_json(4096)


@settings(max_examples=25)
@given(st.text(max_size=60))
def test_decoding_restores_the_text(text: str) -> None:
    assert decode(encode(text, TOKENIZER), TOKENIZER) == text


def test_common_words_are_short() -> None:
    assert len(encode(" the request and the answer", TOKENIZER)) <= 8
    assert len(encode("日本", TOKENIZER)) == 6


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
    model = TinyModel("deepseek_v4", ("sliding", "sparse", "compressed"), 4, 1, 64, window=8)
    with pytest.raises(ValueError, match="not for deepseek_v4"):
        list(tensors(model, 32))


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
