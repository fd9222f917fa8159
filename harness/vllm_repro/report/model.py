"""The report of a run, from which every format is rendered: `report.json` and more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_repro.journal.redact import Redactor
from vllm_repro.report.json_report import ArmJson, RunJson, TrialJson
from vllm_repro.report.measurements import MeasureReport
from vllm_repro.report.timeline import Event
from vllm_repro.scenario.patch import Patch
from vllm_repro.scenario.scenario import Status
from vllm_repro.servers.base import Replaced
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import ArmResult, Expected, Standing, VerdictReport
from vllm_repro_diagnosis.evidence import banner, release_name

_SHORT = 80
"""Letters of an arm's edits that fit into a sentence."""


class TrialReport(TrialJson, frozen=True, kw_only=True):
    """A trial as in `report.json`, with what only the other formats show."""

    # As the server reported it
    version: str | None
    # Result of the trigger, short enough for a table; empty if the evidence is all there is
    brief: str = ""
    # 4xx status and error text of each refusal, in the order of arrival
    refused: tuple[tuple[int, str], ...] = ()
    # Names of the requests without a whole answer
    failed: tuple[str, ...] = ()

    @property
    def severity(self) -> int | None:
        """Return the rank in which failures are shown, 0 first; None if the trial did not fail.

        Explained deaths come before other deaths, then other failures. Cancelled trials come last:
        they decide nothing.
        """
        if self.death is None and self.outcome not in {expected.sign for expected in Expected}:
            return None
        rank = 2 if self.death is None else 0 if self.death.exception else 1
        return rank + 3 * (self.outcome is Outcome.CANCELLED)


class ArmReport(ArmJson, frozen=True, kw_only=True):
    """An arm as in `report.json`, with what only the other formats show."""

    trials: tuple[TrialReport, ...]
    why: str = ""
    # Changes of the reported command, such as `with --enforce-eager`
    edits: tuple[str, ...] = ()
    patches: tuple[Patch, ...] = ()
    # The next three as in `ArmResult`
    unexplained: int = 0
    standing: Standing | None = None
    strange: int = 0

    @property
    def counted(self) -> ArmResult:
        """Return the arm's result as the verdict reads it, over the trials of `counted_trials`."""
        return ArmResult(
            name=self.name,
            expected=self.expected,
            result=self.result,
            crashed=self.k,
            conclusive=self.n,
            bound=self.bound,
            outcomes=tuple(trial.outcome for trial in counted_trials(self.trials)),
            unexplained=self.unexplained,
            standing=self.standing,
            strange=self.strange,
        )

    @property
    def name_and_edits(self) -> str:
        """Return `eager (with --enforce-eager)`; the name alone if the edits are too long."""
        edits = ", ".join(dict.fromkeys(self.edits))
        return f"{self.name} ({edits})" if edits and len(edits) <= _SHORT else self.name

    @property
    def patch_untried(self) -> bool:
        """Return True if no process of the server imported any of the patched files.

        False without patched files, or if an import is unknown.
        """
        files = self.server.patched
        return bool(files) and all(file.imported is False for file in files)


class RunReport(RunJson, frozen=True, kw_only=True):
    """A run as in `report.json`, with what only the other formats show."""

    arms: tuple[ArmReport, ...]
    folder: Path
    title: str
    # Releases that the scenario declares bad and good
    status: Status
    trigger: str
    # Names of the arms that contradict the expectation
    surprises: tuple[str, ...] = ()
    # The journal ends early: the run was killed
    killed: bool = False
    measured: MeasureReport | None = None
    # `issue` is about this bug; else it is the nearest one
    filed: bool = True
    # Issues that the scenario names
    related: tuple[str, ...] = ()
    # Events by arm and trial, also of trials that did not end
    timelines: Mapping[tuple[str, int], Sequence[Event]]
    # For files of the run's folder that are added to a rendering
    redactor: Redactor

    @property
    def shortfall(self) -> str:
        """Return why the report lacks a part of the run, as a sentence without its full stop.

        The run was interrupted or killed, or its journal is damaged. Else empty.
        """
        if self.interrupted:
            return f"Interrupted by {self.interrupted}"
        if self.killed:
            return "The journal is incomplete: the run was killed"
        return "The journal is damaged: some lines cannot be read" if self.journal_cut else ""

    @property
    def bug_seen(self) -> bool:
        """Return True if a boot showed the bug."""
        return any(arm.k for arm in self.arms if arm.expected.has_bug)

    @property
    def failures(self) -> list[tuple[ArmReport, TrialReport]]:
        """Return the failed trials with their arms, by severity, then in the order of arms."""
        trials = [(arm, trial) for arm in self.arms for trial in arm.trials]
        failed = [pair for pair in trials if pair[1].severity is not None]
        return sorted(failed, key=lambda pair: pair[1].severity or 0)

    @property
    def compiled(self) -> str | None:
        """Return the release of the compiled parts; None if they are of the release itself."""
        return next((arm.server.compiled for arm in self.arms if arm.server.compiled), None)

    @property
    def release(self) -> str:
        """Return the vLLM that ran, as `vLLM 0.33.0`, with the release of its compiled parts."""
        return release_name(self.vllm_version or "of unknown version", self.compiled)

    @property
    def banner(self) -> str:
        """Return the report's first line; empty for a GPU."""
        return banner(self.evidence, self.vllm_version, self.compiled)

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """Return the parts of vLLM that the lab replaced, the same in all arms."""
        return next((arm.server.replaced for arm in self.arms if arm.server.replaced), ())


def arm_fields(result: ArmResult) -> dict[str, Any]:
    """Return the result of an arm as keyword arguments of `ArmReport`."""
    return {
        "name": result.name,
        "expected": result.expected,
        "result": result.result,
        "k": result.crashed,
        "n": result.conclusive,
        "bound": result.bound,
        "unexplained": result.unexplained,
        "standing": result.standing,
        "strange": result.strange,
    }


def verdict_fields(decision: VerdictReport) -> dict[str, Any]:
    """Return a verdict as keyword arguments of `RunReport`."""
    return {
        "verdict": decision.verdict,
        "because": decision.because,
        "expected": decision.expected is True,
        "undecided": decision.expected is None,
        "surprises": decision.surprises,
    }


def counted_trials(trials: Sequence[TrialReport]) -> list[TrialReport]:
    """Return the trials that count for the arm's result.

    Cancelled trials and the first `infra` do not count if another trial follows. They were run
    again, and are shown all the same.
    """
    spoiled = [trial for trial in trials if trial.outcome is Outcome.INFRA][:1]
    return [
        trial
        for trial in trials
        if trial in trials[-1:] or (trial.outcome is not Outcome.CANCELLED and trial not in spoiled)
    ]


def issue_url(issue: str) -> str:
    """Return the GitHub URL of the issue `owner/repository#number`; without `#`, of vLLM's issues.

    GitHub redirects the URL if the number is that of a pull request.
    """
    named = issue.replace("#", "/issues/") if "#" in issue else "vllm-project/vllm/issues"
    return f"https://github.com/{named}"
