"""Records of one trial: its options, inputs and observations."""

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

ARM_S = 60.0
"""Seconds in which a run measures the throughput of an arm by default."""


@dataclass(frozen=True)
class MeasureOptions:
    """Measurements to make on an engine that survived its workload."""

    # None until `resolve_measure` has decided it
    throughput: bool | None = False
    # compare each greedy answer with answers to its prompt alone
    outputs: bool = False
    # seconds for the loads of a trial; None for as long as they take
    most_s: float | None = None

    def applies(self, trial: int) -> bool:
        """Return True if the loads are measured in trial number `trial` of an arm.

        With a time limit, only those of the first two trials: two boots show the spread between
        boots.
        """
        return bool(self.throughput) and (self.most_s is None or trial <= 2)


@dataclass(frozen=True, kw_only=True)
class TimeLimits:
    """Seconds without any progress after which to stop waiting.

    None of them limits a whole trial: a slow engine is not dead.
    """

    # without a new log line or an answer, during a boot
    boot_stall: float = 900.0
    # without a counter that moves, with requests in flight
    answer_stall: float = 300.0
    # after the first sign of death, until the log and the exit are complete
    grace: float = 30.0


@dataclass
class Observed:
    """Facts of one trial, filled while it runs. Times are in seconds.

    Each text is a sentence for reports; None: it did not happen.
    """

    facts: ServerFacts | None = None
    # the one that is served, if any
    tiny_model: TinyModel | None = None
    ready: bool = False
    # from the launch until `/health` answered 200; None if it never did
    boot_s: float | None = None
    # release that the server reports
    version: str | None = None
    signs: list[DeathSign] = field(default_factory=list)
    # those of the workload, and one of a measurement if it crashed the engine
    requests: list[SentRequest] = field(default_factory=list)
    # to the workload, without refusals that the scenario allows
    answers: list[Answer] = field(default_factory=list)
    # requests of the workload, without those whose client left
    sent: int = 0
    # the last canary got a token; None if none was sent or the server refused it with a 4xx
    canary_ok: bool | None = None
    hung: str | None = None
    exit: Exit | None = None
    # trouble of the host
    infra: str | None = None
    unsupported: str | None = None
    cancelled: str | None = None
    # measurement in progress, or `NEVER_IDLE`; what the trial died or hung in
    measuring: str = ""
    # failed answers of that measurement
    measured: list[Answer] = field(default_factory=list)
    # answers to the output check
    output: list[OutputSample] = field(default_factory=list)
    # servers of further nodes that still ran after the first node had exited
    outlasted: tuple[Outlasted, ...] = ()
    # log lines that report a death, after which the engine still returned a token
    refuted_lines: int = 0
    # from `/metrics`
    preemptions: int | None = None


@dataclass(kw_only=True)
class Trial:
    """One trial of one arm: everything it needs, and what it has observed so far."""

    scenario: Scenario
    arm: Arm
    # counts the arm's trials, from 1
    number: int
    launch: Launch
    server: Server
    # the server's log
    log: Path
    limits: TimeLimits
    # of the generated prompts
    seed: int
    journal: Journal
    # `requests.jsonl`, with the times of each request
    requests: Journal
    # shows a line of progress
    notify: Callable[[str], None]
    api_key: str | None = None
    measure: MeasureOptions = field(default_factory=MeasureOptions)
    # indices of the leased GPUs
    gpus: tuple[str, ...] = ()
    # no earlier arm of the run has the same server
    own_server: bool = True
    seen: Observed = field(default_factory=Observed)

    @property
    def label(self) -> dict[str, Any]:
        """The fields of every journal line of this trial."""
        return {"arm": self.arm.name, "trial": self.number}
