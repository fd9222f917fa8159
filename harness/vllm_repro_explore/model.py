"""The model folder whose configuration the driver's vLLM reads. Its layers do not matter: each case names its own."""

from __future__ import annotations

from pathlib import Path

from vllm_repro.releases.tinymodel import cached_model
from vllm_repro.tiny_model import StandIn

__all__ = ["driver_model"]

_HYBRID = StandIn(family="gemma3", kinds=("full", "sliding"), window=128, max_position=1_048_576)
"""So that every release takes it for a model whose layers are in several groups."""


def driver_model() -> Path:
    """Made on first use."""
    return cached_model(_HYBRID)
