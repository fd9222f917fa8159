"""Record of a version map: what each arm does in each release, and a sentence for each arm.

A release lives only if every boot of it crossed the boundary and lived. Ranges of living or dying
releases span only releases that were tried and decided. `msgspec.json.schema(VersionMap)` is the
JSON Schema of `versions.json`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import groupby
from statistics import median
from typing import Any, ClassVar, assert_never

import msgspec

from vllm_repro.conversion import convert
from vllm_repro.releases.sources import WITH
from vllm_repro.report.format import seconds, truncate
from vllm_repro.report.model import ArmReport, RunReport, TrialReport
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.statistics import excluded_rate
from vllm_repro.verdict.verdict import (
    ArmResult,
    Expected,
    Result,
    Standing,
    Verdict,
    arm_result,
    same_release,
)
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_search.record import SearchRecord


class ReleaseResult(StrEnum):
    """The result of one arm in one release."""

    LIVES = "lives"
    DIES = "dies"
    SOMETIMES = "dies-sometimes"
    FAILS_OTHERWISE = "fails-otherwise"  # another crash, a hang, wrong output
    UNTRIGGERED = "untriggered"
    BOOT_FAILED = "boot-failed"
    UNSUPPORTED = "unsupported"
    INFRA = "infra"
    UNDECIDED = "undecided"


_IF_ALL_AGREE = {
    outcome: ReleaseResult(outcome) for outcome in Outcome if outcome in {*map(str, ReleaseResult)}
}
"""Results on which all boots must agree: a failed boot beside an unsupported one proves nothing."""


def release_result(result: ArmResult, *, imitated: bool) -> ReleaseResult:
    """Return the result of a release for one arm.

    imitated: False for a rehearsal that cannot show this bug: its quiet boots decide nothing.
    """
    match result.result:
        case Result.REPRODUCES:
            return ReleaseResult.DIES
        case Result.FLAKY:
            return ReleaseResult.SOMETIMES
        case Result.QUIET:
            return ReleaseResult.LIVES if imitated else ReleaseResult.UNDECIDED
        case Result.INCONCLUSIVE | Result.BLOCKED:
            if result.failed_otherwise:
                return ReleaseResult.FAILS_OTHERWISE
            if len(set(result.outcomes)) == 1:
                return _IF_ALL_AGREE.get(result.outcomes[0], ReleaseResult.UNDECIDED)
            return ReleaseResult.UNDECIDED
        case _:
            assert_never(result.result)


_DECIDED = (ReleaseResult.LIVES, ReleaseResult.DIES, ReleaseResult.SOMETIMES)
_DOES = {
    Expected.DIES: "dies",
    Expected.ERRS: "answers wrongly",
    Expected.HANGS: "hangs",
    Expected.SPINS: "is never idle",
}
"""The verb for each bug that an arm can declare."""

_LISTED: Mapping[ReleaseResult | None, tuple[str, str]] = {
    ReleaseResult.FAILS_OTHERWISE: ("fails in another way", "fail in another way"),
    ReleaseResult.UNTRIGGERED: ("does not cross the boundary", "do not cross the boundary"),
    ReleaseResult.BOOT_FAILED: ("does not boot", "do not boot"),
    ReleaseResult.UNSUPPORTED: ("cannot run it here", "cannot run it here"),
    ReleaseResult.INFRA: ("could not be tried", "could not be tried"),
    ReleaseResult.UNDECIDED: ("is undecided", "are undecided"),
    None: ("was not tried", "were not tried"),
}
"""For one release, and for several. None: also a release whose run did not have the arm."""


class CrossedTrigger(msgspec.Struct, frozen=True):
    """Result of the trigger, without its evidence."""

    crossed: bool


class DeathSignature(msgspec.Struct, frozen=True):
    """How a death matches the scenario's signature."""

    # a word of `How`; None if the cause is unknown
    signature: str | None


class ReleaseTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One trial of a version map. The run's `report.json` has all of it."""

    outcome: Outcome
    trigger: CrossedTrigger
    death: DeathSignature | None
    boot_s: float | None


class ReleaseArm(msgspec.Struct, frozen=True, kw_only=True):
    """One arm in one release."""

    name: str
    expected: Expected
    # by its own status, else by the scenario's
    declared: Standing
    fate: ReleaseResult
    result: Result
    # crashes, and boots that decide
    k: int
    n: int
    bound: str
    # empty if there was no run
    trials: tuple[ReleaseTrial, ...]

    @classmethod
    def from_result(
        cls,
        result: ArmResult,
        fate: ReleaseResult,
        declared: Standing,
        trials: Sequence[TrialReport],
    ) -> ReleaseArm:
        """Return the entry of an arm in a release, from its result and its trials."""
        return cls(
            name=result.name,
            expected=result.expected,
            declared=declared,
            fate=fate,
            result=result.result,
            k=result.crashed,
            n=result.conclusive,
            bound=result.bound,
            trials=convert(trials, tuple[ReleaseTrial, ...], from_attributes=True),
        )

    @property
    def outcome(self) -> str:
        """Return `crash`, or `2 crash, 1 clean`, or why the release was not tried."""
        count = Counter(trial.outcome for trial in self.trials)
        if len(self.trials) < 2:
            return next(iter(count), self.fate)
        return ", ".join(f"{number} {outcome}" for outcome, number in count.items())

    @property
    def boundary(self) -> str:
        """Return `crossed`, `not crossed`, `1 of 2 crossed`, or `-` if nothing was sent."""
        # A server that died while it booted was sent nothing.
        ran = [trial for trial in self.trials if trial.trigger.crossed or _got_requests(trial)]
        crossed = sum(trial.trigger.crossed for trial in ran)
        if 0 < crossed < len(ran):
            return f"{crossed} of {len(ran)} crossed"
        return "-" if not ran else "crossed" if crossed else "not crossed"

    @property
    def signature(self) -> str:
        """Return how the deaths match the signature; `unknown` if no log names a cause.

        Return `-` without a death that counts.
        """
        tested = (trial for trial in self.trials if trial.outcome.facts.tested)
        words = dict.fromkeys(trial.death.signature or "unknown" for trial in tested if trial.death)
        return ", ".join(words) or "-"

    @property
    def boot(self) -> str:
        """Return the median time to readiness as text; `-` if no boot was ready."""
        boots = [trial.boot_s for trial in self.trials if trial.boot_s is not None]
        return seconds(median(boots) if boots else None)


def _got_requests(trial: ReleaseTrial) -> bool:
    """Return True if the server was ready, so that requests were sent."""
    return trial.outcome.facts.ran and trial.boot_s is not None


class ReleaseRow(msgspec.Struct, frozen=True, kw_only=True):
    """One release of a version map: what each arm did in it."""

    # as asked for
    version: str
    # as the server reported it, None if none started
    vllm_version: str | None
    declared: Standing
    arms: tuple[ReleaseArm, ...]
    verdict: Verdict | None
    # as declared
    expected: bool
    undecided: bool
    # names of arms that are not as declared
    surprises: tuple[str, ...] = ()
    # one line, empty if the arms suffice
    why: str
    # name of the run's folder
    run: str | None
    # release of its compiled parts, if they are not its own
    compiled: str | None = None

    @property
    def surprise(self) -> bool:
        """Return True if the release clearly did something else than declared."""
        return not self.expected and not self.undecided

    def as_declared(self, arm: ReleaseArm) -> str:
        """Return if an arm did what is declared: `yes`, `SURPRISE`, `undecided` or `-`."""
        if arm.name in self.surprises:
            return "SURPRISE"
        untriggered = arm.fate is ReleaseResult.UNTRIGGERED and arm.expected is Expected.UNTRIGGERED
        if not untriggered and arm.fate not in _DECIDED:
            return "undecided"
        return "-" if arm.declared is Standing.UNKNOWN else "yes"


def row_of(report: RunReport, version: str, declared: Standing, evidence: str | None) -> ReleaseRow:
    """Return the row of a run that was asked for `version`.

    A run of another release or other evidence decides nothing.
    """
    reported = next(
        (trial.version for arm in report.arms for trial in arm.trials if trial.version), None
    )
    doubt = _doubt(report, version, reported, evidence)
    fates = [
        ReleaseResult.UNDECIDED if doubt else release_result(arm.counted, imitated=report.imitated)
        for arm in report.arms
    ]
    return ReleaseRow(
        version=version,
        vllm_version=reported,
        declared=declared,
        arms=tuple(
            ReleaseArm.from_result(arm.counted, fate, arm.standing or declared, arm.trials)
            for arm, fate in zip(report.arms, fates, strict=True)
        ),
        verdict=report.verdict,
        expected=not doubt and report.expected,
        undecided=bool(doubt) or report.undecided,
        surprises=() if doubt else report.surprises,
        why=_one_line(doubt or _why(report)),
        run=report.folder.name,
        compiled=next((arm.server.compiled for arm in report.arms if arm.server.compiled), None),
    )


def row_without_run(
    version: str, scenario: Scenario, arms: Sequence[Arm], fate: ReleaseResult, why: str
) -> ReleaseRow:
    """Return the row of a release for which there was no server. fate: `INFRA` or `UNSUPPORTED`."""
    return ReleaseRow(
        version=version,
        vllm_version=None,
        declared=scenario.status.standing(version),
        arms=tuple(
            ReleaseArm.from_result(
                arm_result(arm.name, arm.expected, ()),
                fate,
                scenario.status_of(arm).standing(version),
                (),
            )
            for arm in arms
        ),
        verdict=None,
        expected=False,
        undecided=True,
        why=_one_line(why),
        run=None,
    )


def _doubt(report: RunReport, version: str, reported: str | None, evidence: str | None) -> str:
    """Return why a run does not count for the release that was asked for; empty if it does.

    reported: the release that the server named. evidence: the kind that the search started with.
    """
    other_evidence = report.evidence != evidence
    if reported is not None and not same_release(reported, version):
        return f"the server reports vLLM {reported}"
    return f"this run is other evidence: {report.evidence}" if other_evidence else ""


def _why(report: RunReport) -> str:
    """Return the reason of the first trial with an unclear outcome, else of an unexpected verdict.

    Empty if all outcomes are clear and the verdict is expected.
    """
    unclear = (
        trial.why for arm in report.arms for trial in arm.trials if trial.outcome not in _clear(arm)
    )
    return next(unclear, "" if report.expected else report.because)


def _clear(arm: ArmReport) -> set[Outcome]:
    """Return the outcomes of an arm that need no reason: clean, and what it is declared to do.

    The latter needs one if a trial has that outcome and still does not count as the bug.
    """
    clear = {Outcome.CLEAN} if arm.strange else {Outcome.CLEAN, arm.expected.sign}
    return clear | {Outcome.UNTRIGGERED} if arm.expected is Expected.UNTRIGGERED else clear


def _one_line(text: str) -> str:
    """Return the text on one line of at most 300 characters."""
    return truncate(" ".join(text.split()), 300)


class VersionMap(SearchRecord, frozen=True, kw_only=True):
    """Record of a version map, perhaps unfinished: `versions.json`."""

    verb: ClassVar[str] = "versions"
    file: ClassVar[str] = "versions"

    arms: tuple[str, ...]
    # boots of each arm and release
    trials: int
    # all that were asked for, in order
    versions: tuple[str, ...]
    # of the releases that were tried, in the same order
    boots: tuple[ReleaseRow, ...] = msgspec.field(default=(), name="rows")
    # the signal that ended it early
    stopped: str | None = msgspec.field(default=None, name="interrupted")

    def after(self, boot: ReleaseRow) -> VersionMap:
        """Return the map with one more release, in the order that was asked for."""
        rows = sorted((*self.boots, boot), key=lambda row: self.versions.index(row.version))
        return msgspec.structs.replace(self, boots=tuple(rows))

    def kept(self) -> tuple[ReleaseRow, ...]:
        """Return no row: `ReleaseSweep` reads the finished runs again."""
        return ()

    @property
    def pending(self) -> tuple[str, ...]:
        """Return the releases that have not been tried yet."""
        tried = {row.version for row in self.boots}
        return tuple(version for version in self.versions if version not in tried)

    @property
    def names_arms(self) -> bool:
        """Return True unless the map is about the reported arm alone."""
        return self.arms != ("reported",)

    @property
    def surprises(self) -> tuple[str, ...]:
        """Return the releases that did something else than declared."""
        return tuple(row.version for row in self.boots if row.surprise)

    @property
    def undecided(self) -> tuple[str, ...]:
        """Return the releases without a clear result, with those not tried yet."""
        return (*(row.version for row in self.boots if row.undecided), *self.pending)

    @property
    def exit_status(self) -> int:
        """Return 1 for a surprise, 2 if a release is undecided, else 0."""
        return 1 if self.surprises else 2 if self.undecided else 0

    def derived(self) -> dict[str, Any]:
        """Return what versions.json has beside the fields, such as the pending releases."""
        return {
            "rehearsal": self.evidence == Evidence.REHEARSAL,
            "pending": self.pending,
            "expected": self.exit_status == 0,
            "undecided": self.exit_status == 2,
        }

    # ── sentences and table ───────────────────────────────────────────────────────────────────────

    @property
    def readings(self) -> tuple[str, ...]:
        """Return a sentence per arm, which is named unless the reported one is alone.

        `dies in 0.21.0 and 0.23.0, lives in 0.24.0; 0.25.1 does not boot`, or for packages of one
        vLLM: `in 0.24.0: dies with a==1, lives with a==2`
        """
        return tuple(
            (f"{name}: " if self.names_arms else "") + self._sentence(name) for name in self.arms
        )

    def _sentence(self, name: str) -> str:
        """Return the sentence on what one arm does in the releases."""
        arms = {row.version: arm for row in self.boots for arm in row.arms if arm.name == name}
        fates = {version: arm.fate for version, arm in arms.items()}
        bugs = (arm.expected for arm in arms.values() if arm.expected.has_bug)
        does = _DOES[next(bugs, Expected.DIES)]
        words = {
            ReleaseResult.LIVES: "lives in",
            ReleaseResult.DIES: f"{does} in",
            ReleaseResult.SOMETIMES: f"{does} in some boots of",
        }
        versions = self.versions
        decided = [version for version in versions if fates.get(version) in _DECIDED]
        spans = [
            (fate, ranges(list(run), versions)) for fate, run in groupby(decided, fates.__getitem__)
        ]
        clauses = [", ".join(f"{words[fate]} {joined(names)}" for fate, names in spans)]
        for listed, verbs in _LISTED.items():
            chosen = [version for version in versions if fates.get(version) is listed]
            # A range would claim that the releases in it were tried.
            untried = listed in (ReleaseResult.INFRA, None)
            clauses.append(_clause(chosen if untried else ranges(chosen, versions), verbs))
        if against := [row.version for row in self.boots if name in row.surprises]:
            clauses.append(f"against what is declared: {joined(against)}")
        text = "; ".join(clause for clause in clauses if clause)
        vllm, *others = sorted({version.partition(WITH)[0] for version in versions})
        if others or not all(WITH in version for version in versions):
            return text
        within = text.replace(f"in {vllm}{WITH}", "with ").replace(f"{vllm}{WITH}", "")
        return f"in {vllm}: {within}"

    @property
    def grid(self) -> list[list[str]]:
        """Return the results of the first arm by vLLM and exchanged packages, below the heads.

        Empty for one vLLM, or without exchanged packages.
        """
        cells = {version.partition(WITH)[::2]: "not tried" for version in self.versions}
        cells |= {row.version.partition(WITH)[::2]: f"{row.arms[0].fate}" for row in self.boots}
        vllms, packages = ([*dict.fromkeys(names)] for names in zip(*cells, strict=True))
        if len(vllms) < 2 or packages == [""]:
            return []
        rows = [[vllm, *(cells.get((vllm, name), "-") for name in packages)] for vllm in vllms]
        return [["vLLM", *(name or "as it is" for name in packages)], *rows]

    def abridged(self) -> VersionMap:
        """Return the map with the packages that all its vLLMs have in `also`, not in their names.

        Not if there are none, if a vLLM then had no package in its name, or two had the same name.
        """
        lists = [version.split(WITH)[1:] for version in self.versions]
        also = tuple(name for name in lists[0] if all(name in names for names in lists))
        short = {
            version: WITH.join(name for name in version.split(WITH) if name not in also)
            for version in self.versions
        }
        named = all(WITH in name for name in short.values())
        if not also or len({*short.values()}) < len(short) or not named:
            return self
        boots = [msgspec.structs.replace(row, version=short[row.version]) for row in self.boots]
        changed = {"versions": tuple(short.values()), "boots": tuple(boots), "also": also}
        return _AbridgedMap(**msgspec.structs.asdict(self) | changed)

    @property
    def excluded(self) -> float:
        """Return the lowest crash rate that `trials` quiet boots of a release exclude."""
        return excluded_rate(self.trials)

    @property
    def expected(self) -> list[Expected]:
        """Return what the arms are declared to do, each once.

        Without rows it is a crash: the headings of an empty table need one.
        """
        arms = [arm for row in self.boots for arm in row.arms]
        return list(dict.fromkeys(arm.expected for arm in arms)) or [Expected.DIES]


class _AbridgedMap(VersionMap, frozen=True, kw_only=True):
    """A version map in which no vLLM is named with the packages that all of them have."""

    also: tuple[str, ...] = ()


def _clause(items: Sequence[str], verbs: tuple[str, str]) -> str:
    """Return a clause such as `0.21.0 and 0.22.0 do not boot`; empty without items.

    verbs: for one release and for several.
    """
    if not items:
        return ""
    several = len(items) > 1 or " to " in items[0]
    return f"{joined(items)} {verbs[several]}"


def ranges(chosen: Sequence[str], tried: Sequence[str]) -> list[str]:
    """Return `0.21.0 to 0.23.0 (3 tried)` for three neighbours in `tried` or more, else names."""
    position = {version: index for index, version in enumerate(tried)}
    items: list[str] = []
    for _, run in groupby(enumerate(chosen), lambda pair: position[pair[1]] - pair[0]):
        names = [version for _, version in run]
        items += [f"{names[0]} to {names[-1]} ({len(names)} tried)"] if len(names) > 2 else names
    return items


def joined(items: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
