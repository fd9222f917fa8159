"""Setup of the search from the server of a scenario; only the workload is then random. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from vllm_repro.command.command import ServeCommand
from vllm_repro.errors import UsageError
from vllm_repro.scenario.scenario import Arm, Lab, Scenario
from vllm_repro.scenario.workload import Conversation, Pause, Rest, Size, requests_of, resolve
from vllm_repro_explore.case import Case, Request, Setup

_STEPS_AHEAD = ("async", "scheduler")
"""Mechanisms of the lab that leave asynchronous scheduling, which is vLLM's default, as it is."""
_PLAYED = (
    "--num-gpu-blocks-override",
    "--block-size",
    "--kv-transfer-config",
    "--max-num-batched-tokens",
    "--max-num-seqs",
    "--max-model-len",
    "--enable-prefix-caching",
    "--disable-hybrid-kv-cache-manager",
    "--enable-chunked-prefill",
    "--async-scheduling",
    "--scheduling-policy",
    "--long-prefill-token-threshold",
)
_UNNEEDED = (
    "--dtype",
    "--enforce-eager",
    "--enable-flashinfer-autotune",
    "--enable-logging-iteration-details",
    "--enable-prompt-tokens-details",
    "--middleware",
    "--served-model-name",
    "--trust-remote-code",
)
"""Flags that change no decision of the scheduler."""
_PLENTY = 4
"""Largest connector capacity, in GPU pools. Larger ones only make the search slower."""


def setup_from(scenario: Scenario, arm: Arm) -> Setup:
    """Return the search's server flags for the server of an arm in the lab.

    Raises `UsageError` if the scenario does not declare layers or blocks, or if the server has a
    flag that the search does not support.
    """
    lab = scenario.lab
    command = scenario.command_in_lab(arm)
    if (
        lab is None
        or not command.number("--num-gpu-blocks-override")
        or not {"full", "sliding"}.issuperset(lab.shape(scenario.model).kinds)
    ):
        raise UsageError(
            f"{scenario.id} has no server that can be played: "
            "its lab does not state layers (full or sliding) and the number of KV blocks",
            hint="vllm-repro list -v names the scenarios with this form, and the forms of each",
        )
    if "kv_load_failure_policy" in transfer_of(command):
        raise _not_played(scenario, "kv_load_failure_policy")
    return server_of(scenario, lab, command)


def server_of(
    scenario: Scenario, lab: Lab, command: ServeCommand, more: Collection[str] = ()
) -> Setup:
    """Return the server flags of a command in the lab; its pool is large if it states no blocks.

    more: flags that the caller plays itself. Raises `UsageError` for others that are not played.
    """
    shape, block = lab.shape(scenario.model), command.number("--block-size") or 16
    max_len = command.number("--max-model-len") or 4096
    seqs = command.number("--max-num-seqs") or 256
    blocks = command.number("--num-gpu-blocks-override") or 4 * -(-max_len // block) + 1
    transfer = transfer_of(command)
    names = {flag.name.replace("--no-", "--", 1) for flag in command.flags}
    if not_played := sorted(names - {*_PLAYED, *_UNNEEDED, *more}):
        raise _not_played(scenario, ", ".join(not_played))
    extra: Mapping[str, Any] = transfer.get("kv_connector_extra_config", {})
    page = 4 * shape.kv_heads * shape.head_dim * block
    room = int(extra.get("cpu_bytes_to_use_per_rank", extra.get("cpu_bytes_to_use", 0))) // page
    return Setup(
        layers=tuple(shape.kinds),
        window=shape.window or 1,
        block=block,
        blocks=blocks,
        chunk=command.number("--max-num-batched-tokens") or 2048,
        seqs=seqs,
        max_len=max_len,
        caching=command.enabled("--enable-prefix-caching") is not False,
        hybrid=not command.enabled("--disable-hybrid-kv-cache-manager"),
        connector=transfer.get("kv_connector", ""),
        lazy=bool(extra.get("lazy_offload", False)),
        cpu_blocks=min(room, _PLENTY * blocks) or _PLENTY * blocks,
        store_polls=int(extra.get("store_polls", 1)),
        load_polls=int(extra.get("load_polls", 0)),
        asynchronous=lab.mechanism in _STEPS_AHEAD
        and command.enabled("--async-scheduling") is not False,
        priority=command.get("--scheduling-policy") == "priority",
        threshold=command.number("--long-prefill-token-threshold") or 0,
    )


def transfer_of(command: ServeCommand) -> dict[str, Any]:
    """Return the value of `--kv-transfer-config`; empty without the flag."""
    return dict(json.loads(command.get("--kv-transfer-config") or "{}"))


def _not_played(scenario: Scenario, flags: str) -> UsageError:
    """Return the error of a server whose flags are not played."""
    return UsageError(
        f"the server of {scenario.id} has flags that are not played: {flags}",
        hint="name another --arm, or search without a scenario: vllm-repro explore --engine",
    )


def case_from(scenario: Scenario, arm: Arm) -> Case:
    """Return an arm's own server and workload as a case of the search, without pauses and rests.

    Raises `UsageError` if the search does not support the server, or if a request is part of a
    conversation, is timed in seconds or has no stated prompt length.
    """
    setup, command, waves = setup_from(scenario, arm), scenario.command_in_lab(arm), []
    for step in scenario.workload_of(arm):
        if isinstance(step, Pause | Rest):
            continue  # each wave is sent after the one before was answered
        if isinstance(step, Conversation):
            raise UsageError(f"{scenario.id} has a conversation, which is not played")
        wave = []
        for request in requests_of((step,)):
            if not isinstance(request.prompt, int | Size):
                raise UsageError(
                    f"{scenario.id} does not state the length of the prompt {request.label!r}"
                )
            if request.starts_after or request.leaves_after is not None:
                raise UsageError(
                    f"{scenario.id} times {request.label!r} in seconds, and steps are played"
                )
            prompt, answer, shared = (
                resolve(size, command, in_lab=True)
                for size in (request.prompt, request.max_tokens, request.shared)
            )
            wave.append(Request(prompt, answer, shared))
        waves.append(wave)
    return Case.numbered(setup, waves, 1)


def draw_for(setup: Setup, seed: int) -> Case:
    """Return a case for a server: a random workload that fits its `max_len`."""
    rng, priority = Random(f"{seed}"), Random(f"{seed}/priority")
    waves = _waves_of(rng, setup.block, setup.chunk)
    most = setup.max_len
    cut = tuple(
        tuple(
            replace(
                ask,
                answer=(answer := min(ask.answer, most - 1)),
                prompt=max(1, min(ask.prompt, most - answer)),
                shared=min(ask.shared, most - answer),
                priority=priority.randrange(4) if setup.priority else 0,
            )
            for ask in wave
        )
        for wave in waves
    )
    return Case.numbered(setup, cut, rng.randrange(10_000))


def _waves_of(rng: Random, block: int, chunk: int) -> tuple[tuple[Request, ...], ...]:
    """Draw one to six waves: groups of requests, each sent when the one before was answered.

    The prompts have one to three lengths. block, chunk: tokens of a KV block and of a step.
    """
    longest = rng.choice((chunk, 2 * chunk, 4 * chunk, 8 * chunk))
    longest = max(2 * block, min(longest, 240 * block))
    usual = [rng.randint(1, longest) for _ in range(rng.choice((1, 1, 2, 3)))]
    answers = [rng.choice((1, 2, 8, block, 3 * block)) for _ in range(rng.choice((1, 2)))]
    shares, late, leaves = rng.random() < 0.4, rng.random() < 0.4, rng.random() < 0.2
    waves = []
    for _ in range(rng.randint(1, 6)):
        width = rng.choice((1, 1, 1, 2, 3, 5))
        waves.append(
            tuple(
                _ask(rng, rng.choice(usual), rng.choice(answers), shares, late, leaves)
                for _ in range(width)
            )
        )
    return tuple(waves)


def _ask(rng: Random, prompt: int, answer: int, shares: bool, late: bool, leaves: bool) -> Request:
    """Draw one request. It may share a prefix (`shares`), come later (`late`), abort (`leaves`)."""
    shared = rng.choice((0, prompt, prompt // 2, rng.randint(0, prompt))) if shares else 0
    after = rng.choice((0, 1, 3, 10)) if late else 0
    abort = rng.choice((-1, -1, 0, 1, 2, 5, 20)) if leaves else -1
    return Request(prompt, answer, shared, after, abort)
