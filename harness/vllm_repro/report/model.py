"""The report of a run, from which every format is rendered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import UNSET, UnsetType

from vllm_repro.client.sdk import SdkView
from vllm_repro.host.machine import Gpu
from vllm_repro.journal.redact import Redactor
from vllm_repro.report.measurements import MeasureReport, PhaseCounters
from vllm_repro.report.timeline import Event
from vllm_repro.scenario.patch import Patch
from vllm_repro.trigger.trigger import TriggerResult
from vllm_repro.verdict.outcome import Death, Outcome, Outlasted
from vllm_repro.verdict.verdict import ArmResult, Expected, Standing, VerdictReport
from vllm_repro_diagnosis.evidence import Evidence

__all__ = [
    "ArmReport",
    "Environment",
    "PatchedFile",
    "Replacement",
    "RunReport",
    "ServerReport",
    "TrialReport",
    "counted_trials",
    "issue_url",
]


_SHORT = 80
"""Letters of an arm's edits that fit into a sentence."""


@dataclass(frozen=True, kw_only=True)
class TrialReport:
    """One trial. Times in seconds; logs are relative to the run's folder.

    during: what the engine was doing when it died after its workload. answers: HTTP results in the order of arrival, runs of equal ones
    folded. output: result of the output check in a word or two. rank_logs: logs of further nodes, by rank from 1. refused: 4xx statuses.
    client_saw: what a program sees that sends the request through the `openai` SDK; None without a crash. failed: names of requests.
    """

    number: int
    outcome: Outcome
    phase: str | None
    trigger: TriggerResult
    death: Death | None
    boot_s: float | None
    duration_s: float | None
    requests: Mapping[str, int]
    log: str
    why: str
    captured: Mapping[str, str]
    version: str | None
    boot: str = ""
    during: str = ""
    answers: tuple[str, ...] = ()
    output: str = ""
    rank_logs: tuple[str, ...] = ()
    outlasted: tuple[Outlasted, ...] = ()
    refused: tuple[int, ...] = ()
    client_saw: SdkView | None = None
    failed: tuple[str, ...] = ()
    counters: tuple[PhaseCounters, ...] = ()

    @property
    def severity(self) -> int | None:
        """Return the rank in which failures are shown, 0 first: explained deaths, other deaths, other failures; None if it did not fail.

        Cancelled trials come last, because they decide nothing.
        """
        if self.death is None and self.outcome not in {expected.sign for expected in Expected}:
            return None
        rank = 2 if self.death is None else 0 if self.death.exception else 1
        return rank + 3 * (self.outcome is Outcome.CANCELLED)


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """A name of vLLM that the lab replaced. effect: on the bug."""

    name: str
    file: str
    sha256: str
    why: str
    effect: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchedFile:
    """A patched file of vLLM as the server's process found it.

    untried: changed functions for which the lab runs something else. imported: whether a process of the server imported it; unset if
    nobody looked.
    """

    file: str
    sha256: str
    untried: tuple[str, ...] = ()
    imported: bool | UnsetType = UNSET


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerReport:
    """The server of an arm. weights, vllm_version: None if unknown. env: what was set on top of the environment.

    source: the vLLM as the user named it, if it is no release. compiled: the release of its compiled parts, if they are not its own.
    """

    kind: str | None = None
    image: str | None = None
    digest: str | None = None
    weights: str | None = None
    vllm_version: str | None = None
    source: str | None = None
    compiled: str | None = None
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    replaced: tuple[Replacement, ...] = ()
    patched: tuple[PatchedFile, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ArmReport:
    """One arm. differences: from the reported command, each with its reason. requests: what its first trial sent."""

    result: ArmResult
    command: str
    differences: tuple[str, ...]
    server: ServerReport
    trials: tuple[TrialReport, ...]
    why: str = ""
    edits: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()
    patches: tuple[Patch, ...] = ()

    @property
    def name(self) -> str:
        return self.result.name

    @property
    def expected(self) -> Expected:
        return self.result.expected

    @property
    def name_and_edits(self) -> str:
        """Return `eager (with --enforce-eager)`, or the name alone if the edits are too long for a sentence."""
        edits = ", ".join(dict.fromkeys(self.edits))
        return f"{self.name} ({edits})" if edits and len(edits) <= _SHORT else self.name

    @property
    def patch_untried(self) -> bool:
        """Return True if no process of the server imported any of the patched files."""
        return bool(self.server.patched) and all(file.imported is False for file in self.server.patched)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machine that a run was made on. memory_gb in units of 2**30 bytes; docker: version of the engine."""

    os: str
    python: str
    cpus: int
    memory_gb: float
    docker: str | None
    gpus: tuple[Gpu, ...]
    driver: str | None


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """A run.

    interrupted: the signal that ended it. cut: the journal ends early (`killed`) or has unreadable lines. imitated: False if the
    rehearsal engine does not have the bug. comparisons: sentences on arms that lived beside one that died. filed: `issue` is about this
    bug, else it is the nearest one. bad, fixed_in: releases that are declared bad, and good. timelines: events by trial, also of trials
    that did not end. redactor: for files of the run's folder that are added to a rendering. compared: patches are compared with the
    first arm.
    """

    folder: Path
    scenario: str
    issue: str
    title: str
    status: str
    bad: str
    fixed_in: str
    trigger: str
    verdict: VerdictReport
    evidence: str
    harness_version: str
    started_at: str
    duration_s: float
    environment: Environment
    arms: tuple[ArmReport, ...]
    infra: tuple[str, ...]
    reproduce: str
    version: str | None
    interrupted: str | None
    cut: bool
    host: str
    standing: Standing
    killed: bool
    imitated: bool = True
    measured: MeasureReport | None = None
    comparisons: tuple[str, ...] = ()
    filed: bool = True
    related: tuple[str, ...] = ()
    timelines: Mapping[tuple[str, int], Sequence[Event]] = field(default_factory=dict)
    redactor: Redactor = field(default_factory=Redactor)
    compared: bool = False

    @property
    def shortfall(self) -> str:
        """Return why the report does not cover the whole run, as a sentence without its stop; empty if it does."""
        if self.interrupted:
            return f"Interrupted by {self.interrupted}"
        if self.killed:
            return "The journal is incomplete: the run was killed"
        return "The journal is damaged: some lines cannot be read" if self.cut else ""

    @property
    def rehearsal(self) -> bool:
        return self.evidence == Evidence.REHEARSAL

    @property
    def bug_seen(self) -> bool:
        """Return True if a boot showed the bug."""
        return any(arm.result.crashed for arm in self.arms if arm.expected.has_bug)

    @property
    def failures(self) -> list[tuple[ArmReport, TrialReport]]:
        """Return the failed trials with their arms, by `TrialReport.severity`, then in the order of arms."""
        found = [(arm, trial) for arm in self.arms for trial in arm.trials if trial.severity is not None]
        return sorted(found, key=lambda pair: pair[1].severity or 0)

    @property
    def replaced(self) -> tuple[Replacement, ...]:
        """Return what the lab replaced, which is the same for all arms."""
        return next((arm.server.replaced for arm in self.arms if arm.server.replaced), ())


def counted_trials(trials: Sequence[TrialReport]) -> list[TrialReport]:
    """Return the trials that decide something: a cancelled one and the first `infra`, if run again, are shown, but not counted."""
    spoiled = [trial for trial in trials if trial.outcome is Outcome.INFRA][:1]
    return [
        trial
        for trial in trials
        if trial in trials[-1:] or (trial.outcome is not Outcome.CANCELLED and trial not in spoiled)
    ]


def issue_url(issue: str) -> str:
    """Return the address of `owner/repository#number`. GitHub redirects it if it is a pull request."""
    repository, _, number = issue.partition("#")
    return f"https://github.com/{repository}/issues/{number}"
