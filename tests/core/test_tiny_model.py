"""Tiny models: accepted fields and names."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_repro.tiny_model import TinyModel

DEEPSEEK: dict[str, Any] = {
    "family": "deepseek_v4",
    "kinds": ("sliding", "sparse", "compressed", "sparse"),
    "heads": 64,
    "kv_heads": 1,
    "head_dim": 512,
    "window": 128,
}


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"family": "mamba"}, "no tiny model of family 'mamba'"),
        ({"heads": 4, "kv_heads": 3}, "evenly"),
        ({"kinds": ()}, "count from 1"),
        ({"drafts": -1}, "count from 1"),
        ({"kinds": ("full", "sliding"), "window": 128}, "qwen3 has no sliding layers, only full"),
        (
            {"family": "deepseek_v4", "kinds": ("full",), "window": 128},
            "deepseek_v4 has no full layers",
        ),
        ({"window": 128}, "window=… goes with sliding layers"),
        ({"family": "gemma3"}, "window=… goes with sliding layers"),
        ({"drafts": 1}, "no drafter for qwen3"),
        ({"vocab": 264}, "at least 265 tokens"),
        ({"fp8": True}, "fp8=… is for deepseek_v4"),
    ],
)
def test_a_shape_that_no_model_has_is_refused(shape: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TinyModel(**shape)


def test_the_shape_is_said_in_words() -> None:
    assert str(TinyModel()) == "2 layers, 4 heads, 2 KV heads of 32"
    assert str(TinyModel(vocab=151936)) == "2 layers, 4 heads, 2 KV heads of 32, 151,936 token ids"
    assert (
        str(TinyModel("mimo", ("full",), 24, 4, 256, drafts=1))
        == "1 layer and 1 that drafts, 24 heads, 4 KV heads of 256"
    )
    assert (
        str(TinyModel(**DEEPSEEK))
        == "4 layers (sliding then sparse then compressed then sparse attention, with a window of"
        " 128 tokens), 64 heads, 1 KV head of 512"
    )


def test_a_mimo_is_as_wide_as_its_heads_together() -> None:
    assert TinyModel("mimo", heads=24, kv_heads=4, head_dim=256, hidden=256).width == 6144
    assert TinyModel(heads=24, kv_heads=4, head_dim=256, hidden=256).width == 256


def test_each_tiny_model_has_a_folder_of_its_own() -> None:
    others = [
        TinyModel(),
        TinyModel(hidden=64),
        TinyModel(vocab=300),
        TinyModel(max_position=64),
        TinyModel("mimo"),
        TinyModel("mimo", drafts=1),
    ]
    assert len({one.slug for one in others}) == len(others)
    assert TinyModel().slug == TinyModel().slug
    assert TinyModel().slug.startswith("qwen3-2x4x2x32-")
