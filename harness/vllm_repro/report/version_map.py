"""The version map: what an arm does over releases, one row a release, and one sentence that reads it. Pure.

A release counts as living only where every boot of it crossed the boundary and lived. One that does not boot, is not supported, could not
be tried, stays short of the boundary or decides nothing is said to be that, and no range of living or dying releases reaches over it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from vllm_repro.report.model import RunReport, TrialReport
from vllm_repro.report.wording import cut
from vllm_repro.scenario.scenario import Arm, Scenario, Status
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.release_result import ReleaseResult, release_result
from vllm_repro.verdict.verdict import ArmResult, Expected, Standing, Verdict, arm_result, same_release

__all__ = ["ArmRow", "Row", "VersionMap", "readings", "row_of", "row_without_run"]

_RANGED = {
    ReleaseResult.LIVES: "lives in",
    ReleaseResult.DIES: "dies in",
    ReleaseResult.SOMETIMES: "dies in some boots of",
}

_INSTEAD = {
    Expected.ERRS: _RANGED
    | {ReleaseResult.DIES: "answers wrongly in", ReleaseResult.SOMETIMES: "answers wrongly in some boots of"},
    Expected.HANGS: _RANGED | {ReleaseResult.DIES: "hangs in", ReleaseResult.SOMETIMES: "hangs in some boots of"},
    Expected.SPINS: _RANGED
    | {ReleaseResult.DIES: "never rests in", ReleaseResult.SOMETIMES: "never rests in some boots of"},
}
"""Of a bug that is no death."""

_LISTED: Mapping[ReleaseResult, tuple[str, str]] = {
    ReleaseResult.FAILS_OTHERWISE: ("fails in another way", "fail in another way"),
    ReleaseResult.UNTRIGGERED: ("does not cross the boundary", "do not cross the boundary"),
    ReleaseResult.BOOT_FAILED: ("does not boot", "do not boot"),
    ReleaseResult.UNSUPPORTED: ("cannot run it here", "cannot run it here"),
    ReleaseResult.INFRA: ("could not be tried", "could not be tried"),
    ReleaseResult.UNDECIDED: ("is undecided", "are undecided"),
}
"""For one release and for several."""

_NOT_TRIED = ("was not tried", "were not tried")


@dataclass(frozen=True)
class ArmRow:
    """One arm in one release. declared: what its own status says, else the scenario's. `trials` is empty where there was no run."""

    result: ArmResult
    fate: ReleaseResult
    declared: Standing
    trials: tuple[TrialReport, ...] = ()

    @property
    def name(self) -> str:
        return self.result.name

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "expected": self.result.expected.value,
            "declared": self.declared.value,
            "fate": self.fate.value,
            "result": self.result.result.value,
            "k": self.result.crashed,
            "n": self.result.conclusive,
            "bound": self.result.bound,
            "trials": [_trial(trial) for trial in self.trials],
        }


def _trial(trial: TrialReport) -> dict[str, Any]:
    signature = trial.death.signature if trial.death else None
    return {
        "outcome": trial.outcome.value,
        "trigger": {"crossed": trial.trigger.crossed},
        "death": {"signature": signature.value if signature else None} if trial.death else None,
        "boot_s": trial.boot_s,
    }


@dataclass(frozen=True)
class Row:
    """One release. version: as asked for; reported: as the server said, None where none did. expected: True as declared, False a
    surprise, None undecided; `surprises` names the arms. why: one line, empty where the arms say it all. run: the run folder's name.
    """

    version: str
    reported: str | None
    declared: Standing
    arms: tuple[ArmRow, ...]
    verdict: Verdict | None
    expected: bool | None
    surprises: tuple[str, ...]
    why: str
    run: str | None

    def as_declared(self, arm: ArmRow) -> bool | None:
        """The same for one arm of the row."""
        if arm.name in self.surprises:
            return False
        short = arm.fate is ReleaseResult.UNTRIGGERED and arm.result.expected is Expected.UNTRIGGERED
        return True if short or arm.fate in _RANGED else None

    def as_json(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "vllm_version": self.reported,
            "declared": self.declared.value,
            "arms": [arm.as_json() for arm in self.arms],
            "verdict": self.verdict.value if self.verdict else None,
            "expected": self.expected is True,
            "undecided": self.expected is None,
            "why": self.why,
            "run": self.run,
        }


def row_of(report: RunReport, version: str, declared: Standing, evidence: str) -> Row:
    """The row of a run that was asked for `version`. A run of something else (another release, other evidence) decides nothing."""
    reported = next((trial.version for arm in report.arms for trial in arm.trials if trial.version), None)
    doubt = _doubt(report, version, reported, evidence)
    arms = tuple(
        ArmRow(
            arm.result,
            ReleaseResult.UNDECIDED if doubt else release_result(arm.result, imitated=report.imitated),
            arm.result.standing or declared,
            arm.trials,
        )
        for arm in report.arms
    )
    return Row(
        version,
        reported,
        declared,
        arms,
        report.verdict.verdict,
        None if doubt else report.verdict.expected,
        () if doubt else report.verdict.surprises,
        _one_line(doubt or _why(report, arms)),
        report.folder.name,
    )


def row_without_run(version: str, scenario: Scenario, arms: Sequence[Arm], outcome: ReleaseResult, why: str) -> Row:
    """The row of a release of which no server could be had; `outcome` is `INFRA` or `UNSUPPORTED`."""
    empty = tuple(
        ArmRow(arm_result(arm.name, arm.expected, ()), outcome, scenario.status_of(arm).standing(version))
        for arm in arms
    )
    return Row(version, None, scenario.status.standing(version), empty, None, None, (), _one_line(why), None)


def _doubt(report: RunReport, version: str, reported: str | None, evidence: str) -> str:
    if reported is not None and not same_release(reported, version):
        return f"the server says that it is vLLM {reported}"
    if report.evidence != evidence:
        return f"this run is evidence of another kind: {report.evidence}"
    return ""


def _why(report: RunReport, arms: Sequence[ArmRow]) -> str:
    for arm in arms:
        # An arm that is declared to stay short of the boundary, and does, needs no reason.
        plain = {Outcome.CLEAN} if arm.result.strange else {Outcome.CLEAN, arm.result.expected.sign}
        if arm.result.expected is Expected.UNTRIGGERED:
            plain.add(Outcome.UNTRIGGERED)
        for trial in arm.trials:
            if trial.outcome not in plain:
                return trial.why
    return "" if report.verdict.expected else report.verdict.because


def _one_line(text: str) -> str:
    return cut(" ".join(text.split()), 300)


@dataclass(frozen=True)
class VersionMap:
    """A map as far as it has come. versions: all that were asked for, in order; rows: those that were tried, in the same order.

    evidence: None where no server was ever had. trials: boots of each arm. duration_s in seconds.
    """

    scenario: str
    issue: str
    title: str
    status: Status
    server: str
    evidence: str | None
    arms: tuple[str, ...]
    trials: int
    versions: tuple[str, ...]
    rows: tuple[Row, ...]
    harness_version: str
    started_at: str
    duration_s: float
    reproduce: str
    interrupted: str | None = None

    def with_row(self, row: Row) -> VersionMap:
        return replace(self, rows=(*self.rows, row))

    @property
    def pending(self) -> tuple[str, ...]:
        tried = {row.version for row in self.rows}
        return tuple(version for version in self.versions if version not in tried)

    @property
    def names_arms(self) -> bool:
        """Whether what it says must name the arm that it says it of."""
        return self.arms != ("reported",)

    @property
    def surprises(self) -> tuple[str, ...]:
        return tuple(row.version for row in self.rows if row.expected is False)

    @property
    def undecided(self) -> tuple[str, ...]:
        return tuple(row.version for row in self.rows if row.expected is None)

    @property
    def expected(self) -> bool | None:
        """False where a row is a surprise, None where one is undecided or missing, else True."""
        if self.surprises:
            return False
        return None if self.undecided or self.pending else True

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "scenario": self.scenario,
            "issue": self.issue,
            "title": self.title,
            "status": {"bad": self.status.bad, "good": self.status.good},
            "server": self.server,
            "evidence": self.evidence,
            "rehearsal": self.evidence == "rehearsal",
            "arms": list(self.arms),
            "trials": self.trials,
            "versions": list(self.versions),
            "pending": list(self.pending),
            "reading": ". ".join(readings(self)),
            "expected": self.expected is True,
            "undecided": self.expected is None,
            "rows": [row.as_json() for row in self.rows],
            "harness_version": self.harness_version,
            "started_at": self.started_at,
            "duration_s": self.duration_s,
            "interrupted": self.interrupted,
            "reproduce": self.reproduce,
        }


def readings(version_map: VersionMap) -> tuple[str, ...]:
    """What the map says, a sentence an arm: `dies in 0.21.0 and 0.23.0, lives in 0.24.0; 0.25.1 does not boot`.

    An arm is named unless it is the reported one alone: that another one lives says nothing of the bug.
    """
    return tuple(
        (f"{name}: " if version_map.names_arms else "") + _sentence(version_map, name) for name in version_map.arms
    )


def _sentence(version_map: VersionMap, name: str) -> str:
    arms = {row.version: arm for row in version_map.rows for arm in row.arms if arm.name == name}
    fates = {version: arm.fate for version, arm in arms.items()}
    ranged_words = next((_INSTEAD.get(arm.result.expected, _RANGED) for arm in arms.values()), _RANGED)
    tested = version_map.versions
    ranged = [version for version in tested if fates.get(version) in _RANGED]
    clauses = [
        ", ".join(
            f"{ranged_words[of]} {_joined(_items(list(group), tested))}"
            for of, group in groupby(ranged, fates.__getitem__)
        )
    ]
    for listed, words in _LISTED.items():
        chosen = [version for version in tested if fates.get(version) is listed]
        clauses.append(_clause(chosen if listed is ReleaseResult.INFRA else _items(chosen, tested), words))
    # Also a release whose run has no such arm: a map must not be silent about one.
    clauses.append(_clause([version for version in tested if version not in arms], _NOT_TRIED))
    against = [row.version for row in version_map.rows if name in row.surprises]
    if against:
        clauses.append(f"against what is declared: {_joined(against)}")
    return "; ".join(clause for clause in clauses if clause)


def _clause(items: Sequence[str], words: tuple[str, str]) -> str:
    if not items:
        return ""
    several = len(items) > 1 or " to " in items[0]
    return f"{_joined(items)} {words[several]}"


def _items(chosen: Sequence[str], tested: Sequence[str]) -> list[str]:
    """`0.21.0 to 0.23.0 (3 tried)` for three or more that follow each other in `tested`, else their names."""
    position = {version: index for index, version in enumerate(tested)}
    items: list[str] = []
    for _, run in groupby(enumerate(chosen), lambda pair: position[pair[1]] - pair[0]):
        names = [version for _, version in run]
        items += [f"{names[0]} to {names[-1]} ({len(names)} tried)"] if len(names) > 2 else names
    return items


def _joined(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
