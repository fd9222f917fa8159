"""The server of a scenario as the search's setup, so that only workloads are drawn. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from vllm_repro.errors import UsageError
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro_explore.case import Case, Setup
from vllm_repro_explore.draw import waves_of

__all__ = ["draw_for", "setup_from"]

_PLENTY = 4
"""A connector's room in pools of the GPU: what does not fit into so much is rare, and counting it costs time."""


def setup_from(scenario: Scenario, arm: Arm) -> Setup:
    """Raises `UsageError` where the scenario does not say how it goes to the lab."""
    lab = scenario.lab
    if lab is None or isinstance(lab.layers, int):
        raise UsageError(
            f"{scenario.id} does not say which layers a scheduler would have",
            hint="layers=[…] in its lab=Lab(…), as sco-hybrid has; or --connector NAME searches from a general start",
        )
    command, shape = scenario.command_in_lab(arm), lab.shape(scenario.model)
    block = command.number("--block-size") or 16
    blocks = command.number("--num-gpu-blocks-override")
    if not blocks:
        raise UsageError(f"{scenario.id} does not say how many blocks the pool has", hint="--num-gpu-blocks-override")
    transfer = json.loads(command.get("--kv-transfer-config") or "{}")
    extra: Mapping[str, Any] = transfer.get("kv_connector_extra_config", {})
    page = 4 * shape.kv_heads * shape.head_dim * block
    room = int(extra.get("cpu_bytes_to_use_per_rank", extra.get("cpu_bytes_to_use", 0))) // page
    return Setup(
        layers=tuple(shape.kinds),
        window=shape.window or 1,
        block=block,
        blocks=blocks,
        chunk=command.number("--max-num-batched-tokens") or 2048,
        seqs=command.number("--max-num-seqs") or 8,
        max_len=command.number("--max-model-len") or 4096,
        caching=command.enabled("--enable-prefix-caching") is not False,
        hybrid=not command.enabled("--disable-hybrid-kv-cache-manager"),
        connector=transfer.get("kv_connector", ""),
        lazy=bool(extra.get("lazy_offload", False)),
        cpu_blocks=min(room, _PLENTY * blocks) or _PLENTY * blocks,
    )


def draw_for(setup: Setup, seed: int) -> Case:
    """A workload for that server. The lab's copies take one step for a store and none for a load, so these do too."""
    rng = Random(f"{seed}")
    waves = waves_of(rng, setup.block, setup.chunk)
    most = setup.max_len
    cut = tuple(
        tuple(
            replace(
                ask,
                answer=(answer := min(ask.answer, most - 1)),
                prompt=max(1, min(ask.prompt, most - answer)),
                shared=min(ask.shared, most - answer),
            )
            for ask in wave
        )
        for wave in waves
    )
    return Case(setup, cut, rng.randrange(10_000))
