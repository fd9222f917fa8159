"""Attention shapes of public models, as in their config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllm_repro.scenario.scenario import Model

_QWEN3_SMALL = Model(
    "Qwen/Qwen3-0.6B",
    heads=16,
    kv_heads=8,
    head_dim=128,
    layers=28,
    vocab_size=151936,
    max_position=40960,
)
_MODELS = (
    _QWEN3_SMALL,
    replace(_QWEN3_SMALL, name="Qwen/Qwen3-1.7B"),
    replace(_QWEN3_SMALL, name="Qwen/Qwen3-8B", heads=32, layers=36),
    Model(
        "Qwen/Qwen3.5-9B",
        architecture="Qwen3_5ForConditionalGeneration",
        heads=16,
        kv_heads=4,
        head_dim=256,
        layers=32,
        full_attention_interval=4,
        vocab_size=248320,
        max_position=262144,
    ),
    Model(
        "Lorbus/Qwen3.6-27B-int4-AutoRound",
        architecture="Qwen3_5ForConditionalGeneration",
        heads=24,
        kv_heads=4,
        head_dim=256,
        layers=64,
        full_attention_interval=4,
        block_size=1024,
        vocab_size=248320,
        max_position=262144,
    ),
    Model(
        "google/gemma-3-1b-it",
        architecture="Gemma3ForCausalLM",
        heads=4,
        kv_heads=1,
        head_dim=256,
        layers=26,
        vocab_size=262144,
        max_position=32768,
    ),
    Model(
        "Salesforce/blip2-opt-2.7b",
        architecture="Blip2ForConditionalGeneration",
        heads=32,
        kv_heads=32,
        head_dim=80,
        layers=32,
        vocab_size=50304,
        max_position=2048,
    ),
)
_BY_NAME: Mapping[str, Model] = {model.name: model for model in _MODELS}


def public_model(
    name: str,
    *,
    why: str = "",
    tiny_will_do: bool = False,
    block_size: int | None = None,
    max_position: int | None = None,
) -> Model:
    """Return a public model with the attention shape of its config.json: see `Model`.

    why, tiny_will_do: as in `Model`. block_size, max_position: values in tokens that replace those
    of the model. Raises `ValueError` for a model whose shape is not in this module.
    """
    if name not in _BY_NAME:
        raise ValueError(
            f"the shape of {name!r} is not kept, only of {', '.join(_BY_NAME)}: write Model(…)"
        )
    model = replace(_BY_NAME[name], why=why, tiny_will_do=tiny_will_do)
    model = replace(model, block_size=block_size or model.block_size)
    return replace(model, max_position=max_position or model.max_position)
