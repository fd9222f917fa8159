"""Setup of the search from the server of a scenario; only the workload is then random. Pure."""

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
"""Largest connector capacity, in GPU pools. Larger ones only make the search slower."""


def setup_from(scenario: Scenario, arm: Arm) -> Setup:
    """Return the setup of an arm in the lab. Raise `UsageError` if the scenario does not declare layers or blocks."""
    lab = scenario.lab
    if lab is None or isinstance(lab.layers, int):
        raise UsageError(
            f"{scenario.id} does not declare the layers of its model",
            hint="add layers=[…] to its lab=Lab(…), as sco-hybrid does; or search without a scenario: --connector NAME",
        )
    command, shape = scenario.command_in_lab(arm), lab.shape(scenario.model)
    block = command.number("--block-size") or 16
    blocks = command.number("--num-gpu-blocks-override")
    if not blocks:
        raise UsageError(
            f"{scenario.id} does not declare the number of KV blocks", hint="add --num-gpu-blocks-override to its lab"
        )
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
    """Return a random workload for that server that fits its `max_len`."""
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
