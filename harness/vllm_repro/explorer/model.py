"""The model folder whose configuration the driver's vLLM reads. Its layers do not matter: each case names its own."""

from __future__ import annotations

from pathlib import Path

from vllm_repro.releases.provision import cache_root
from vllm_repro.releases.tinymodel import make_tiny_model

__all__ = ["driver_model"]

_POSITIONS = 1_048_576


def driver_model() -> Path:
    """Made on first use; a hybrid, so that every release takes it for a model whose layers are in several groups."""
    return make_tiny_model(
        cache_root() / "models" / "explored",
        family="gemma3",
        heads=4,
        kv_heads=2,
        head_dim=32,
        max_position=_POSITIONS,
        kinds=("full", "sliding"),
        window=128,
    )
