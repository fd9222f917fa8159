"""What every rendering of a run is made from: a `RunReport`, and its JSON form, which is the contract (`report.schema.json`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_repro.evidence import facts_of
from vllm_repro.journal.redact import Redactor
from vllm_repro.report.measured import Measured
from vllm_repro.report.timeline import Timeline
from vllm_repro.scenario.patch import Patch
from vllm_repro.trigger.trigger import Finding
from vllm_repro.verdict.outcome import Death, Outcome, Outlasted
from vllm_repro.verdict.verdict import ArmResult, Expected, Standing, VerdictReport

__all__ = ["ArmReport", "RunReport", "TrialReport", "banner", "counting", "issue_url"]

_SIGNS = {expected.sign for expected in Expected}
"""What a bug may do."""


@dataclass(frozen=True)
class TrialReport:
    """One trial. Times in seconds; `log` is relative to the run's folder."""

    number: int
    outcome: Outcome
    phase: str | None
    trigger: Finding
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
    """What an engine that died was asked for after its workload; empty for a death in it."""
    answers: tuple[str, ...] = ()
    """HTTP results of the workload in the order of arrival, equal ones in a row as one."""
    output: str = ""
    """What the output check made of the answers, in a word or two; empty where none was made."""
    rank_logs: tuple[str, ...] = ()
    """Of further nodes, by rank from 1."""
    outlasted: tuple[Outlasted, ...] = ()
    refused: tuple[int, ...] = ()
    """Statuses of the requests that the server would not take."""

    @property
    def failed(self) -> int | None:
        """How soon a reader is to see it, 0 first: a death that is explained, any other, then what else a bug may do, such as a hang.
        A boot that was cut comes after all of them, since it decides nothing. None where the engine did nothing of the kind."""
        if self.death is None and self.outcome not in _SIGNS:
            return None
        rank = 2 if self.death is None else 0 if self.death.exception else 1
        return rank + 3 * (self.outcome is Outcome.CANCELLED)

    def as_json(self, measured: Measured | None, arm: str) -> dict[str, Any]:
        death = self.death
        soak = measured and measured.soak_of(arm, self.number)
        return {
            "trial": self.number,
            "outcome": self.outcome.value,
            "phase": self.phase,
            "trigger": {"crossed": self.trigger.crossed, "evidence": list(self.trigger.evidence)},
            "death": None
            if death is None
            else {
                "detected_by": death.detected_by,
                "latency_s": death.latency_s,
                "exception": death.exception,
                "message": death.message,
                "frames": list(death.frames),
                "signature": death.signature.value if death.signature else None,
                "channels": list(death.channels),
                "ranks": list(death.ranks),
            },
            "boot_s": self.boot_s,
            "duration_s": self.duration_s,
            "requests": dict(self.requests),
            "answers": list(self.answers),
            "output": self.output or None,
            "throughput": measured and measured.trial_json(arm, self.number),
            "soak": soak and {**asdict(soak), "tenths": list(soak.tenths)},
            "log": self.log,
            "rank_logs": list(self.rank_logs),
            "outlasted": [asdict(one) for one in self.outlasted],
            "why": self.why,
            "during": self.during,
            "captured": dict(self.captured),
            "boot": self.boot,
        }


@dataclass(frozen=True)
class ArmReport:
    """One arm. `server`: what was run, under the contract's names."""

    result: ArmResult
    command: str
    differences: tuple[str, ...]
    server: Mapping[str, Any]
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
    def idle(self) -> bool:
        """Whether none of the code that was changed for it can have run."""
        changed = self.server.get("patched") or ()
        return bool(changed) and not any(one.get("imported", True) for one in changed)

    def as_json(self, measured: Measured | None) -> dict[str, Any]:
        return {
            "name": self.name,
            "expected": self.expected.value,
            "command": self.command,
            "differences": list(self.differences),
            "requests": list(self.requests),
            "server": dict(self.server),
            "result": self.result.result.value,
            "k": self.result.crashed,
            "n": self.result.conclusive,
            "bound": self.result.bound,
            "trials": [trial.as_json(measured, self.name) for trial in self.trials],
        }


@dataclass(frozen=True)
class RunReport:
    """A whole run. `interrupted`: the signal that ended it; `cut`: its journal is not whole, be it that it ends before the run did
    (`killed`) or that lines of it cannot be read."""

    folder: Path
    scenario: str
    issue: str
    title: str
    status: str
    trigger: str
    verdict: VerdictReport
    evidence: str
    harness_version: str
    started_at: str
    duration_s: float
    environment: Mapping[str, Any]
    arms: tuple[ArmReport, ...]
    infra: tuple[str, ...]
    reproduce: str
    version: str | None
    interrupted: str | None
    cut: bool
    imitated: bool = True
    """False for a rehearsal of a bug that the rehearsal engine does not have: that it lives says nothing."""
    measured: Measured | None = None
    comparisons: tuple[str, ...] = ()
    """What arms that should live show beside one that died."""
    filed: bool = True
    """Whether `issue` is about this bug; else it is only what the bug is nearest to."""
    related: tuple[str, ...] = ()
    """Issues that the scenario names beside its own."""
    timelines: Mapping[tuple[str, int], Timeline] = field(default_factory=dict)
    """By arm and trial; also of a trial that a cut run did not end."""
    host: str = ""
    """Which machine it was made on (`vllm_repro.host.host_id`)."""
    standing: Standing = Standing.UNKNOWN
    """What the scenario declares for the release."""
    killed: bool = False
    redactor: Redactor = field(default_factory=Redactor)
    """What the journal was read through; whatever of the run's folder is added to a rendering has to go through it too."""

    @property
    def shortfall(self) -> str:
        """Why this is not all of the run, as a sentence without its stop; empty where it is."""
        if self.interrupted:
            return f"Interrupted by {self.interrupted}"
        if self.killed:
            return "The journal is cut: the run was killed"
        return "The journal is damaged: lines of it cannot be read" if self.cut else ""

    @property
    def rehearsal(self) -> bool:
        return self.evidence == "rehearsal"

    @property
    def seen(self) -> bool:
        """Whether a boot showed the bug."""
        return any(arm.result.crashed for arm in self.arms if arm.result.expected.has_bug)

    @property
    def failures(self) -> list[tuple[ArmReport, TrialReport]]:
        """Every trial that failed, the most telling first (`TrialReport.failed`), else in the order of arms."""
        found = [(arm, trial) for arm in self.arms for trial in arm.trials if trial.failed is not None]
        return sorted(found, key=lambda pair: pair[1].failed or 0)

    @property
    def deaths(self) -> list[tuple[ArmReport, TrialReport]]:
        """Those of them whose engine died."""
        return [(arm, trial) for arm, trial in self.failures if trial.death]

    @property
    def issue_url(self) -> str:
        return issue_url(self.issue)

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "scenario": self.scenario,
            "issue": self.issue,
            "verdict": self.verdict.verdict.value,
            "because": self.verdict.because,
            "comparisons": list(self.comparisons),
            "expected": self.verdict.expected is True,
            "undecided": self.verdict.expected is None,
            "evidence": self.evidence,
            "rehearsal": self.rehearsal,
            "harness_version": self.harness_version,
            "started_at": self.started_at,
            "duration_s": self.duration_s,
            "environment": dict(self.environment),
            "arms": [arm.as_json(self.measured) for arm in self.arms],
            "throughput": self.measured and self.measured.as_json(),
            "throughput_withheld": (self.measured and self.measured.withheld) or None,
            "infra": list(self.infra),
            "reproduce": self.reproduce,
            "interrupted": self.interrupted,
            "journal_cut": self.cut,
        }


def counting(trials: Sequence[TrialReport]) -> list[TrialReport]:
    """Those that count: a boot that was cut, and made again when the run was gone on with, is shown and decides nothing."""
    last = trials[-1:]
    return [trial for trial in trials if trial.outcome is not Outcome.CANCELLED or trial in last]


def issue_url(issue: str) -> str:
    """Of `owner/repository#number`; GitHub leads on to a pull request where it is one."""
    repository, _, number = issue.partition("#")
    return f"https://github.com/{repository}/issues/{number}"


def banner(evidence: str, version: str | None) -> str:
    """Return the first line of a report about anything but a GPU; empty for a GPU."""
    return facts_of(evidence).banner.format(release=f"vLLM {version}" if version else "vLLM")
