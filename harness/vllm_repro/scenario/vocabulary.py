"""Vocabulary of scenario files.

A scenario file is Python for an editor and a type checker, but it is read as data (see `vllm_repro.scenario.reader`). It may contain
only these words, literals, and names that it assigns itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from vllm_repro.command.command import ServeCommand
from vllm_repro.scenario.patch import Patch
from vllm_repro.scenario.scenario import (
    Arm,
    Cause,
    Causes,
    Dummy,
    Edit,
    Lab,
    Lengths,
    Model,
    Needs,
    Scenario,
    SourceLine,
    Status,
)
from vllm_repro.scenario.workload import (
    Step,
    chat,
    completion,
    conversation,
    flag,
    pause,
    request,
    rest,
    sized,
    together,
)
from vllm_repro.trigger.conditions import (
    answered,
    attention_backend,
    chunked_prefill,
    continuation_over,
    drafting,
    graphs_captured,
    left_waiting,
    preempted,
    prefill_over,
    prefilled_together,
    prefix_hit,
    sent_with,
)
from vllm_repro.trigger.offload_store import block_listed_twice, offload_outgrown
from vllm_repro.trigger.sparse_prefill import sparse_prefill_outgrown
from vllm_repro.trigger.trigger import Condition
from vllm_repro.trigger.turboquant_workspace import workspace_outgrown
from vllm_repro.verdict.output import Checks
from vllm_repro.verdict.throughput import Load
from vllm_repro.verdict.verdict import Expected
from vllm_repro_diagnosis.diagnosis import Phase
from vllm_repro_diagnosis.signature import Signature

__all__ = [
    "Causes", "Dummy", "Lab", "Model", "Needs", "Scenario", "Status", "answered", "arm", "attention_backend", "block_listed_twice",
    "cause", "chat", "checks", "chunked_prefill", "completion", "continuation_over", "conversation", "dies", "drafting", "errs", "flag",
    "graphs_captured", "hangs", "left_waiting", "lengths", "lives", "offload_outgrown", "patched", "pause", "preempted", "prefill_over",
    "prefilled_together", "prefix_hit", "request", "rest", "sent_with", "signature", "simple_cpu_offload", "sized",
    "source_line", "sparse_prefill_outgrown", "spins", "throughput", "together", "untriggered", "with_flags", "without",
    "workspace_outgrown",
]  # fmt: skip

dies = Expected.DIES
lives = Expected.LIVES
untriggered = Expected.UNTRIGGERED
errs = Expected.ERRS
hangs = Expected.HANGS
spins = Expected.SPINS

checks = Checks
lengths = Lengths
patched = Patch
source_line = SourceLine
throughput = Load


def with_flags(*words: str, lab: str = "", dummy: str = "", why: str = "") -> Edit:
    """Add flags, or replace those of the same name: `with_flags("--max-num-batched-tokens 8192")`.

    lab: flags to use instead with the lab's smaller model and pool. dummy: likewise with `--weights dummy`.
    """

    def apply(command: ServeCommand) -> ServeCommand:
        return command.with_flags(*words)

    in_lab, in_dummy = (with_flags(flags) if flags else None for flags in (lab, dummy))
    return Edit("with " + " ".join(words), apply, why, in_lab, in_dummy)


def without(*names: str, why: str = "") -> Edit:
    """Remove flags: `without("--speculative-config")`."""

    def apply(command: ServeCommand) -> ServeCommand:
        return command.without(*names)

    return Edit("without " + " ".join(names), apply, why)


def simple_cpu_offload(cpu_bytes: int, *, lazy: bool = False) -> str:
    """Return the flag that enables the simple CPU offload connector: `with_flags(simple_cpu_offload(131_072))`."""
    room = {"cpu_bytes_to_use": cpu_bytes} | ({"lazy_offload": True} if lazy else {})
    config = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": room}
    return f"--kv-transfer-config '{json.dumps(config, separators=(',', ':'))}'"


def signature(
    *,
    exception: str,
    message: str,
    frames: Sequence[str],
    phase: Literal["boot", "warmup", "request", "idle", "shutdown"],
    source: str | None = None,
    not_in_message: Sequence[str] = (),
) -> Signature:
    """Return the crash signature of a bug: see `vllm_repro_diagnosis.signature.Signature`. `{name}` in the message captures a value."""
    return Signature(
        exception=exception,
        message=message,
        frames=tuple(frames),
        phase=Phase(phase),
        source=source,
        not_in_message=tuple(not_in_message),
    )


def arm(
    name: str,
    expected: Expected,
    *edits: Edit | Patch,
    workload: Sequence[Step] | None = None,
    bad: str = "",
    trigger: Condition | None = None,
    why: str = "",
) -> Arm:
    """Return a server configuration: the edits of the reported command, and the expected result.

    bad: releases with the bug, if not the scenario's. trigger: the arm's own trigger, if not the scenario's.
    """
    if bad:
        Status(bad)  # raises ValueError for a wrong specifier
    return Arm(
        name,
        expected,
        tuple(edit for edit in edits if isinstance(edit, Edit)),
        None if workload is None else tuple(workload),
        why,
        patches=tuple(edit for edit in edits if isinstance(edit, Patch)),
        bad=bad,
        trigger=trigger,
    )


def cause(
    name: str, release: str, expected: Expected, *patches: Patch, arm: str = "reported", believed: str = ""
) -> Cause:
    """Return a change of `release`, and whether it then dies or lives. believed: who takes it for a fix that it is not."""
    return Cause(name, release, expected, tuple(patches), arm, believed)
