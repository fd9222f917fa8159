"""Vocabulary of scenario files.

A scenario file is Python for an editor and a type checker, but it is read as data (see
`vllm_repro.scenario.reader`). It may contain only these words, literals, and names that it assigns
itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal

from vllm_repro.command.command import ServeCommand
from vllm_repro.scenario.patch import Patch
from vllm_repro.scenario.public_models import public_model
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
    at_once,
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
from vllm_repro.tiny_model import Family, Kind
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
    unstated,
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
    "Causes", "Dummy", "Lab", "Model", "Needs", "Scenario", "Status", "answered", "arm",
    "assertion", "at_once", "attention_backend", "block_listed_twice", "cause", "chat", "checks",
    "chunked_prefill", "completion", "continuation_over", "conversation", "dies", "drafting",
    "errs", "flag", "graphs_captured", "hangs", "image", "late_connector", "left_waiting",
    "lengths", "lives", "offload_outgrown", "offloading", "patched", "pause", "preempted",
    "prefill_over", "prefilled_together", "prefix_hit", "public_model", "remote_prefill", "request",
    "rest", "scheduler_lab", "sent_with", "session_lab", "signature", "simple_cpu_offload", "sized",
    "source_line", "sparse_prefill_outgrown", "spins", "throughput", "together", "unstated",
    "untriggered", "with_flags", "without", "workspace_outgrown",
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
    """Return an edit that adds flags, or replaces those of the same name.

        with_flags("--max-num-batched-tokens 8192")

    lab: flags to use instead with the lab's smaller model and pool. dummy: likewise with `--weights
    dummy`. why: reason for the report.
    """

    def apply(command: ServeCommand) -> ServeCommand:
        """Return the command with these flags."""
        return command.with_flags(*words)

    in_lab, in_dummy = (with_flags(flags) if flags else None for flags in (lab, dummy))
    return Edit("with " + " ".join(words), apply, why, in_lab, in_dummy)


def without(*names: str, why: str = "") -> Edit:
    """Return an edit that removes flags: `without("--speculative-config")`."""

    def apply(command: ServeCommand) -> ServeCommand:
        """Return the command without these flags."""
        return command.without(*names)

    return Edit("without " + " ".join(names), apply, why)


def simple_cpu_offload(cpu_bytes: int, *, lazy: bool = False) -> str:
    """Return the `--kv-transfer-config` of the simple CPU offload connector, for `with_flags`.

    lazy: copy a block only when it is about to be overwritten.
    """
    return _connector(
        "SimpleCPUOffloadConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": cpu_bytes}
        | ({"lazy_offload": True} if lazy else {}),
    )


def offloading(cpu_bytes: int, **settings: int) -> str:
    """Return the `--kv-transfer-config` of the offloading connector, for `with_flags`.

    settings: further ones that only the lab reads, such as `store_polls=8`.
    """
    return _connector(
        "OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"cpu_bytes_to_use": cpu_bytes, **settings},
    )


def late_connector(*, rejects: bool = False) -> str:
    """Return the `--kv-transfer-config` of a KV connector of the lab, for `with_flags`.

    It moves no KV blocks and reports each transfer late. rejects: set vLLM's policy that recomputes
    failed loads.
    """
    policy = {"kv_load_failure_policy": "recompute"} if rejects else {}
    return _connector(
        "LateConnector",
        kv_connector_module_path="vllm_repro_lab.late_connector",
        kv_role="kv_both",
        **policy,
    )


def _connector(name: str, **settings: object) -> str:
    """Return `--kv-transfer-config` with the quoted JSON of a KV connector and its settings."""
    config = json.dumps({"kv_connector": name, **settings}, separators=(",", ":"))
    return f"--kv-transfer-config '{config}'"


def remote_prefill(engine: str, port: int, blocks: Sequence[Sequence[int]]) -> Mapping[str, object]:
    """Return `kv_transfer_params` of a request whose prompt another server has computed.

    engine: its id. port: where its KV connector listens on this host. blocks: block numbers of each
    group of layers there.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": blocks,
        "remote_engine_id": engine,
        "remote_request_id": engine,
        "remote_host": "localhost",
        "remote_port": port,
        "tp_size": 1,
    }


_PNG = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42m"
_PIXELS = {
    "red": "P4z8AAAAMBAQD3A0FDAAAAAElFTkSuQmCC",
    "green": "Ng+M8AAAICAQBF9FLUAAAAAElFTkSuQmCC",
    "blue": "NgYPgPAAEDAQA2dBFAAAAAAElFTkSuQmCC",
    "white": "P4//8/AAX+Av4zEpUUAAAAAElFTkSuQmCC",
    "black": "NgYGAAAAAEAAHI6uv5AAAAAElFTkSuQmCC",
}


def image(colour: Literal["red", "green", "blue", "white", "black"]) -> Mapping[str, object]:
    """Return a part of a chat message: an image of one pixel."""
    return {"type": "image_url", "image_url": {"url": _PNG + _PIXELS[colour]}}


_NO_WEIGHTS = "the scheduler does not use weights"


def scheduler_lab(
    *changes: Edit,
    layers: int | Sequence[Kind] = 2,
    mechanism: str = "scheduler",
    family: Family | None = None,
    window: int | None = None,
    arms: Sequence[str] = (),
    why: str = _NO_WEIGHTS,
) -> Lab:
    """Return the lab settings for a bug that the scheduler decides, without real weights.

    changes: edits after `--enforce-eager`. why: reason that the tiny model can replace the reported
    one. The other arguments are those of `Lab`.
    """
    return Lab(
        mechanism=mechanism,
        layers=layers,
        family=family,
        window=window,
        arms=arms,
        why=why,
        changes=(with_flags("--enforce-eager", why="no compiler is needed"), *changes),
    )


def session_lab(*changes: Edit) -> Lab:
    """Return the lab settings for a bug of streaming sessions, which use `POST /segments`.

    changes: edits before those that every such scenario needs.
    """
    return Lab(
        mechanism="async",
        layers=2,
        why=_NO_WEIGHTS,
        changes=(
            *changes,
            with_flags(
                "--dtype float32", why="bfloat16 needs AMX to be enabled on some processors"
            ),
            with_flags(
                "--middleware vllm_repro_lab.segments.route",
                why="adds POST /segments: /v1/realtime serves audio models only",
            ),
        ),
    )


def assertion(source: str, frames: Sequence[str]) -> Signature:
    """Return the crash signature of an `assert` without a message that fails during a request.

    source: its line in vLLM. frames: functions of the traceback, the failing one last.
    """
    return signature(
        phase="request", exception="AssertionError", message="", source=source, frames=frames
    )


def signature(
    *,
    exception: str,
    message: str,
    frames: Sequence[str],
    phase: Literal["boot", "warmup", "request", "idle", "shutdown"],
    source: str | None = None,
    not_in_message: Sequence[str] = (),
) -> Signature:
    """Return the crash signature of a bug: see `vllm_repro_diagnosis.signature.Signature`.

    `{name}` in the message captures a value.
    """
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

    bad: releases with the bug, if not the scenario's. workload, trigger: the arm's own, if not the
    scenario's. Raises `ValueError` if `bad` is no version specifier.
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
    name: str,
    release: str,
    expected: Expected,
    *patches: Patch,
    arm: str = "reported",
    believed: str = "",
) -> Cause:
    """Return a change of the source of `release`, and whether the arm then dies or lives.

    believed: who reported it as the fix, although it is not.
    """
    return Cause(name, release, expected, tuple(patches), arm, believed)
