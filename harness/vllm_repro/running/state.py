"""Records of one trial: its options, what it was given, and what it has observed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_repro.client.answer import Answer
from vllm_repro.journal.journal import Journal
from vllm_repro.running.death_signs import DeathSign
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.base import Exit, Server, ServerFacts
from vllm_repro.servers.launch import Launch
from vllm_repro.tiny_model import TinyModel
from vllm_repro.trigger.trigger import SentRequest
from vllm_repro.verdict.outcome import Outlasted
from vllm_repro.verdict.output import OutputSample

__all__ = ["MeasureOptions", "Observed", "TimeLimits", "Trial"]


@dataclass(frozen=True)
class MeasureOptions:
    """Measurements to make on an engine that survived its workload."""

    throughput: bool = False
    # compare each greedy answer with answers to its prompt alone
    outputs: bool = False


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Seconds without any progress after which to stop waiting.

    None of them limits a whole trial: a slow engine is not dead.

    boot_stall: without a new log line or an answer during a boot. answer_stall: with requests in
    flight and no counter moving. grace: after the first sign of death, for the log and the exit to
    complete.
    """

    boot_stall: float = 900.0
    answer_stall: float = 300.0
    grace: float = 30.0


@dataclass
class Observed:
    """Facts of one trial, filled while it runs. Times in seconds.

    measuring: the measurement in progress after the workload. measured: its failed answers. output:
    answers to the output check. tiny_model: the tiny model that is served, if any. outlasted: the
    servers of further nodes that stayed when the first one was gone. refuted_lines: lines of the
    log that report a death, and after which the engine still gave a token. preemptions: by
    `/metrics`.
    """

    facts: ServerFacts | None = None
    tiny_model: TinyModel | None = None
    ready: bool = False
    boot_s: float | None = None
    version: str | None = None
    signs: list[DeathSign] = field(default_factory=list)
    asked: list[SentRequest] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    sent: int = 0
    canary_ok: bool | None = None
    hung: str | None = None
    exit: Exit | None = None
    infra: str | None = None
    unsupported: str | None = None
    cancelled: str | None = None
    measuring: str = ""
    measured: list[Answer] = field(default_factory=list)
    output: list[OutputSample] = field(default_factory=list)
    outlasted: tuple[Outlasted, ...] = ()
    refuted_lines: int = 0
    preemptions: int | None = None


@dataclass(kw_only=True)
class Trial:
    """One boot of one arm: everything it needs, and what it has observed so far.

    gpus: indices of the leased ones.
    """

    scenario: Scenario
    arm: Arm
    number: int
    launch: Launch
    server: Server
    log: Path
    limits: TimeLimits
    seed: int
    journal: Journal
    requests: Journal
    notify: Callable[[str], None]
    api_key: str | None = None
    measure: MeasureOptions = field(default_factory=MeasureOptions)
    gpus: tuple[str, ...] = ()
    seen: Observed = field(default_factory=Observed)

    @property
    def label(self) -> dict[str, Any]:
        """The fields of every journal line of this trial."""
        return {"arm": self.arm.name, "trial": self.number}
