"""The words of a scenario file, all in one place.

    from vllm_repro.vocabulary import Scenario, arm, chat, dies, flag, ...

A scenario file is ordinary Python for an editor and a type checker, but it is read as data (see `vllm_repro.scenario_file`): only
these words, literals and names that the file itself assigns may occur in it, so a scenario from a stranger runs no code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vllm_repro.autopsy.diagnosis import Phase
from vllm_repro.autopsy.signature import Signature
from vllm_repro.commands.command import ServeCommand
from vllm_repro.scenario import Arm, Edit, Lab, Model, Needs, Scenario, Status
from vllm_repro.sizes import flag
from vllm_repro.trigger import attention_backend, chunked_prefill, continuation_over, sent_with
from vllm_repro.verdict import Expected
from vllm_repro.workload import Step, chat, completion, pause, together

__all__ = [
    "Lab",
    "Model",
    "Needs",
    "Scenario",
    "Status",
    "arm",
    "attention_backend",
    "chat",
    "chunked_prefill",
    "completion",
    "continuation_over",
    "dies",
    "flag",
    "lives",
    "pause",
    "sent_with",
    "signature",
    "together",
    "untriggered",
    "with_flags",
    "without",
]

dies = Expected.DIES
lives = Expected.LIVES
untriggered = Expected.UNTRIGGERED


def with_flags(*words: str, why: str = "") -> Edit:
    """Adds flags, or replaces those of the same name: `with_flags("--max-num-batched-tokens 8192")`."""

    def apply(command: ServeCommand) -> ServeCommand:
        return command.with_flags(*words)

    return Edit("with " + " ".join(words), apply, why)


def without(*names: str, why: str = "") -> Edit:
    """Takes flags away: `without("--speculative-config")`."""

    def apply(command: ServeCommand) -> ServeCommand:
        return command.without(*names)

    return Edit("without " + " ".join(names), apply, why)


def signature(
    *,
    exception: str,
    message: str,
    frames: Sequence[str],
    phase: Literal["boot", "warmup", "request", "idle", "shutdown"],
    source: str | None = None,
    not_in_message: Sequence[str] = (),
) -> Signature:
    """What this bug's death looks like: see `vllm_repro.autopsy.signature.Signature`. `{name}` in the message is a hole that is kept."""
    return Signature(exception, message, tuple(frames), Phase(phase), source, tuple(not_in_message))


def arm(name: str, expected: Expected, *edits: Edit, workload: Sequence[Step] | None = None, why: str = "") -> Arm:
    """One server configuration, what it is expected to do, and the edits that make it from the reported command."""
    return Arm(name, expected, edits, None if workload is None else tuple(workload), why)
