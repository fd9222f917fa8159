"""The version map: what each arm does in each release, a sentence per arm that sums it up, and both as Markdown and for the terminal.

A release lives only if every boot of it crossed the boundary and lived. Ranges of living or dying releases span only releases that were
tried and decided.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import PurePath
from statistics import median

from vllm_repro.report.format import columns, seconds, truncate
from vllm_repro.report.model import RunReport, TrialReport, issue_url
from vllm_repro.report.text import cell, fence
from vllm_repro.scenario.scenario import Arm, Scenario, Status
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.statistics import excluded_rate
from vllm_repro.verdict.verdict import ArmResult, Expected, Standing, Verdict, arm_result, same_release
from vllm_repro_diagnosis.evidence import banner, facts_of, simulated
from vllm_repro_search.versions.release_result import ReleaseResult, release_result

__all__ = [
    "ReleaseArm",
    "ReleaseRow",
    "VersionMap",
    "agreement",
    "joined",
    "map_heads",
    "map_rows",
    "markdown",
    "meaning",
    "ranges",
    "readings",
    "row_of",
    "row_without_run",
    "terminal",
]

_DECIDED = (ReleaseResult.LIVES, ReleaseResult.DIES, ReleaseResult.SOMETIMES)
_DOES = {Expected.ERRS: "answers wrongly", Expected.HANGS: "hangs", Expected.SPINS: "is never idle"}
"""The verb for a bug that is no crash."""

_LISTED: Mapping[ReleaseResult, tuple[str, str]] = {
    ReleaseResult.FAILS_OTHERWISE: ("fails in another way", "fail in another way"),
    ReleaseResult.UNTRIGGERED: ("does not cross the boundary", "do not cross the boundary"),
    ReleaseResult.BOOT_FAILED: ("does not boot", "do not boot"),
    ReleaseResult.UNSUPPORTED: ("cannot run it here", "cannot run it here"),
    ReleaseResult.INFRA: ("could not be tried", "could not be tried"),
    ReleaseResult.UNDECIDED: ("is undecided", "are undecided"),
}
"""For one release, and for several."""

_NOT_TRIED = ("was not tried", "were not tried")


@dataclass(frozen=True, kw_only=True)
class ReleaseArm:
    """One arm in one release. declared: by its own status, else by the scenario's. trials: empty if there was no run."""

    result: ArmResult
    fate: ReleaseResult
    declared: Standing
    trials: tuple[TrialReport, ...] = ()

    @property
    def name(self) -> str:
        return self.result.name


@dataclass(frozen=True, kw_only=True)
class ReleaseRow:
    """One release.

    version: as asked for. reported: by the server, None if none started. expected: True as declared, False a surprise, None undecided.
    surprises: names of arms. why: one line, empty if the arms suffice. run: name of the run's folder. compiled: the release of its
    compiled parts, if they are not its own.
    """

    version: str
    reported: str | None
    declared: Standing
    arms: tuple[ReleaseArm, ...]
    verdict: Verdict | None
    expected: bool | None
    surprises: tuple[str, ...]
    why: str
    run: str | None
    compiled: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Return what a reader must know of this row besides its cells."""
        mixed = f"its Python code ran over the compiled parts of {self.compiled}" if self.compiled else ""
        return tuple(note for note in (mixed, self.why) if note)

    def as_declared(self, arm: ReleaseArm) -> bool | None:
        """Return `expected` of one arm."""
        if arm.name in self.surprises:
            return False
        untriggered = arm.fate is ReleaseResult.UNTRIGGERED and arm.result.expected is Expected.UNTRIGGERED
        return True if untriggered or arm.fate in _DECIDED else None


def row_of(report: RunReport, version: str, declared: Standing, evidence: str) -> ReleaseRow:
    """Return the row of a run that was asked for `version`. A run of another release or other evidence decides nothing."""
    reported = next((trial.version for arm in report.arms for trial in arm.trials if trial.version), None)
    doubt = _doubt(report, version, reported, evidence)
    arms = tuple(
        ReleaseArm(
            result=arm.counted,
            fate=ReleaseResult.UNDECIDED if doubt else release_result(arm.counted, imitated=report.imitated),
            declared=arm.standing or declared,
            trials=arm.trials,
        )
        for arm in report.arms
    )
    return ReleaseRow(
        version=version,
        reported=reported,
        declared=declared,
        arms=arms,
        verdict=report.verdict,
        expected=None if doubt else report.as_expected,
        surprises=() if doubt else report.surprises,
        why=_one_line(doubt or _why(report, arms)),
        run=report.folder.name,
        compiled=next((arm.server.compiled for arm in report.arms if arm.server.compiled), None),
    )


def row_without_run(
    version: str, scenario: Scenario, arms: Sequence[Arm], outcome: ReleaseResult, why: str
) -> ReleaseRow:
    """Return the row of a release for which there was no server. outcome: `INFRA` or `UNSUPPORTED`."""
    return ReleaseRow(
        version=version,
        reported=None,
        declared=scenario.status.standing(version),
        arms=tuple(
            ReleaseArm(
                result=arm_result(arm.name, arm.expected, ()),
                fate=outcome,
                declared=scenario.status_of(arm).standing(version),
            )
            for arm in arms
        ),
        verdict=None,
        expected=None,
        surprises=(),
        why=_one_line(why),
        run=None,
    )


def _doubt(report: RunReport, version: str, reported: str | None, evidence: str) -> str:
    if reported is not None and not same_release(reported, version):
        return f"the server reports vLLM {reported}"
    if report.evidence != evidence:
        return f"this run is other evidence: {report.evidence}"
    return ""


def _why(report: RunReport, arms: Sequence[ReleaseArm]) -> str:
    for arm in arms:
        clear = {Outcome.CLEAN} if arm.result.strange else {Outcome.CLEAN, arm.result.expected.sign}
        if arm.result.expected is Expected.UNTRIGGERED:
            clear.add(Outcome.UNTRIGGERED)
        for trial in arm.trials:
            if trial.outcome not in clear:
                return trial.why
    return "" if report.as_expected else report.because


def _one_line(text: str) -> str:
    return truncate(" ".join(text.split()), 300)


@dataclass(frozen=True, kw_only=True)
class VersionMap:
    """A map, perhaps unfinished.

    versions: all that were asked for, in order; rows: those that were tried, in the same order. evidence: None if no server ever started.
    trials: boots of each arm. duration_s: in seconds.
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
    rows: tuple[ReleaseRow, ...]
    harness_version: str
    started_at: str
    duration_s: float
    reproduce: str
    interrupted: str | None = None

    def with_row(self, row: ReleaseRow) -> VersionMap:
        """Return the map with one more row, in the order of `versions`."""
        return replace(self, rows=tuple(sorted((*self.rows, row), key=lambda one: self.versions.index(one.version))))

    @property
    def pending(self) -> tuple[str, ...]:
        tried = {row.version for row in self.rows}
        return tuple(version for version in self.versions if version not in tried)

    @property
    def shortfall(self) -> str:
        """Return why the map has not all rows, as a sentence without its stop; empty if it has."""
        if self.interrupted:
            return f"Interrupted by {self.interrupted}: this is what was seen until then"
        tried, asked = len(self.rows), len(self.versions)
        return f"Not finished: {tried} of {asked} releases were tried" if self.pending else ""

    @property
    def names_arms(self) -> bool:
        """Return True unless the map is about the reported arm alone."""
        return self.arms != ("reported",)

    @property
    def surprises(self) -> tuple[str, ...]:
        return tuple(row.version for row in self.rows if row.expected is False)

    @property
    def undecided(self) -> tuple[str, ...]:
        return tuple(row.version for row in self.rows if row.expected is None)

    @property
    def expected(self) -> bool | None:
        """Return False if a row is a surprise, None if one is undecided or missing, else True."""
        if self.surprises:
            return False
        return None if self.undecided or self.pending else True


# ── the sentence of each arm ──────────────────────────────────────────────────────────────────────────────────────────────


def readings(version_map: VersionMap) -> tuple[str, ...]:
    """Return a sentence per arm: `dies in 0.21.0 and 0.23.0, lives in 0.24.0; 0.25.1 does not boot`.

    Arms are named unless the reported one is alone.
    """
    return tuple(
        (f"{name}: " if version_map.names_arms else "") + _sentence(version_map, name) for name in version_map.arms
    )


def _sentence(version_map: VersionMap, name: str) -> str:
    arms = {row.version: arm for row in version_map.rows for arm in row.arms if arm.name == name}
    fates = {version: arm.fate for version, arm in arms.items()}
    does = next((_DOES[arm.result.expected] for arm in arms.values() if arm.result.expected in _DOES), "dies")
    words = {
        ReleaseResult.LIVES: "lives in",
        ReleaseResult.DIES: f"{does} in",
        ReleaseResult.SOMETIMES: f"{does} in some boots of",
    }
    asked = version_map.versions
    decided = [version for version in asked if fates.get(version) in _DECIDED]
    clauses = [
        ", ".join(f"{words[of]} {joined(ranges(list(run), asked))}" for of, run in groupby(decided, fates.__getitem__))
    ]
    for listed, verbs in _LISTED.items():
        chosen = [version for version in asked if fates.get(version) is listed]
        clauses.append(_clause(chosen if listed is ReleaseResult.INFRA else ranges(chosen, asked), verbs))
    # This includes releases whose run did not have the arm.
    clauses.append(_clause([version for version in asked if version not in arms], _NOT_TRIED))
    if against := [row.version for row in version_map.rows if name in row.surprises]:
        clauses.append(f"against what is declared: {joined(against)}")
    return "; ".join(clause for clause in clauses if clause)


def _clause(items: Sequence[str], verbs: tuple[str, str]) -> str:
    if not items:
        return ""
    several = len(items) > 1 or " to " in items[0]
    return f"{joined(items)} {verbs[several]}"


def ranges(chosen: Sequence[str], asked: Sequence[str]) -> list[str]:
    """Return `0.21.0 to 0.23.0 (3 tried)` for three or more that are neighbours in `asked`, else their names."""
    position = {version: index for index, version in enumerate(asked)}
    items: list[str] = []
    for _, run in groupby(enumerate(chosen), lambda pair: position[pair[1]] - pair[0]):
        names = [version for _, version in run]
        items += [f"{names[0]} to {names[-1]} ({len(names)} tried)"] if len(names) > 2 else names
    return items


def joined(items: Sequence[str]) -> str:
    """Return `a, b and c`."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


# ── Markdown and terminal ─────────────────────────────────────────────────────────────────────────────────────────────────

_WIDTHS: tuple[int, ...] = (16, 12, 24, 32, 16, 20, 16, 8, 12, 24)
_ARM = 2
"""The column of that name, see `map_heads`."""


def markdown(version_map: VersionMap) -> str:
    """Return `versions.md`, which lies in `<scenario>/versions/<id>/` and links to runs from there."""
    parts = [f"# {version_map.scenario}: version map{simulated(version_map.evidence or '')}"]
    if notice := banner(version_map.evidence or "", None):
        parts.append(f"> **{notice}**")
    if version_map.shortfall:
        parts.append(f"> **{version_map.shortfall}.**")
    parts.append(f"{version_map.title} ([{version_map.issue}]({issue_url(version_map.issue)})).")
    first, *others = readings(version_map)
    if others:
        parts.append("\n".join(f"- **{text}.**" for text in (first, *others)))
    else:
        parts.append(f"**{first[0].upper()}{first[1:]}.**")
    parts.append(f"Declared: {version_map.status}. {agreement(version_map)}")
    parts.append(_table(version_map))
    if notes := [f"- {row.version}: {cell(note)}" for row in version_map.rows for note in row.notes]:
        parts.append("\n".join(notes))
    parts.append(meaning(version_map))
    parts.append(
        f"Server: {version_map.server}, evidence: {version_map.evidence or 'none'}. vllm-repro {version_map.harness_version}, "
        f"started {version_map.started_at}, took {version_map.duration_s:.0f} s."
    )
    parts += ["## Again", fence(version_map.reproduce, "console")]
    return "\n\n".join(parts) + "\n"


def terminal(version_map: VersionMap, path: str) -> str:
    """Return the last lines of `vllm-repro versions`. path: of `versions.md`."""
    rows, widths = [map_heads(version_map), *map_rows(version_map)], _WIDTHS
    if not version_map.names_arms:
        rows = [(*row[:_ARM], *row[_ARM + 1 :]) for row in rows]
        widths = (*_WIDTHS[:_ARM], *_WIDTHS[_ARM + 1 :])
    lines = [
        f"{version_map.scenario}   {version_map.issue}   version map, {facts_of(version_map.evidence).subject}",
        "",
        *columns(rows, widths),
        "",
        *(f"{row.version}: {note}" for row in version_map.rows for note in row.notes),
        *(f"{' ' * 10 if number else 'reading:  '}{text}" for number, text in enumerate(readings(version_map))),
        f"declared: {version_map.status}. {agreement(version_map)}",
        f"map:      {path}",
        f"again:    {version_map.reproduce}",
    ]
    if version_map.interrupted:
        lines.append(f"interrupted by {version_map.interrupted}; nothing is left running")
        lines.append(f"resume:   vllm-repro versions --resume {shlex.quote(str(PurePath(path).parent))}")
    return "\n".join(lines)


def agreement(version_map: VersionMap) -> str:
    if version_map.expected:
        return "Every release is as declared."
    surprises = ", ".join(version_map.surprises)
    text = f"A SURPRISE in {surprises}." if surprises else "No release contradicts that."
    undecided = [*version_map.undecided, *version_map.pending]
    return text + (f" Undecided: {', '.join(undecided)}." if undecided else "")


def _expected(version_map: VersionMap) -> list[Expected]:
    """Return what the arms are declared to do, each once; a crash if there is no row yet."""
    found = dict.fromkeys(arm.result.expected for row in version_map.rows for arm in row.arms)
    return list(found) or [Expected.DIES]


def map_heads(version_map: VersionMap) -> tuple[str, ...]:
    did = " or ".join(dict.fromkeys(expected.did for expected in _expected(version_map)))
    return ("release", "declared", "arm", "outcome", did, "boundary", "signature", "boot", "as declared", "run")


def _table(version_map: VersionMap) -> str:
    heads = map_heads(version_map)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in map_rows(version_map):
        *cells, run = row
        link = f"[{run}](../../{run}/report.md)" if run != "-" else run
        lines.append(f"| {' | '.join(map(cell, cells))} | {link} |")
    return "\n".join(lines)


def map_rows(version_map: VersionMap) -> Iterator[tuple[str, ...]]:
    """Yield a row per release and arm, under `map_heads`."""
    for row in version_map.rows:
        for arm in row.arms:
            yield (
                row.version,
                "-" if arm.declared is Standing.UNKNOWN else arm.declared,
                arm.name,
                _outcome(arm),
                f"{arm.result.crashed} of {arm.result.conclusive}" if arm.result.conclusive else "-",
                _boundary(arm),
                _signature(arm),
                _boot(arm),
                _as_declared(row, arm),
                row.run or "-",
            )
    for version in version_map.pending:
        yield (version, "-", "", "not tried", *["-"] * (len(_WIDTHS) - 4))


def _outcome(arm: ReleaseArm) -> str:
    """Return `crash`, or `2 crash, 1 clean`, or why the release was not tried."""
    count = Counter(trial.outcome for trial in arm.trials)
    if not count:
        return arm.fate
    return ", ".join(f"{number} {outcome}" if len(arm.trials) > 1 else outcome for outcome, number in count.items())


def _boundary(arm: ReleaseArm) -> str:
    # A server that died while it booted was sent nothing.
    ran = [
        trial for trial in arm.trials if trial.trigger.crossed or (trial.outcome.facts.ran and trial.boot_s is not None)
    ]
    crossed = sum(trial.trigger.crossed for trial in ran)
    if 0 < crossed < len(ran):
        return f"{crossed} of {len(ran)} crossed"
    return "-" if not ran else "crossed" if crossed else "not crossed"


def _signature(arm: ReleaseArm) -> str:
    """Return how the deaths compare with the scenario's signature; `unknown` if no log names a cause."""
    deaths = [trial.death for trial in arm.trials if trial.death and trial.outcome.facts.tested]
    return ", ".join(dict.fromkeys(death.signature or "unknown" for death in deaths)) or "-"


def _boot(arm: ReleaseArm) -> str:
    """Return the median time to readiness."""
    boots = [trial.boot_s for trial in arm.trials if trial.boot_s is not None]
    return seconds(median(boots) if boots else None)


def _as_declared(row: ReleaseRow, arm: ReleaseArm) -> str:
    declared = "-" if arm.declared is Standing.UNKNOWN else "yes"
    return {True: declared, False: "SURPRISE", None: "undecided"}[row.as_declared(arm)]


def meaning(version_map: VersionMap) -> str:
    boots = "one boot" if version_map.trials == 1 else f"{version_map.trials} boots"
    events = " or ".join(dict.fromkeys(expected.event for expected in _expected(version_map)))
    return (
        f"A release lives if each of its boots crossed the boundary and lived: {boots}, which excludes {events} in more "
        f"than {excluded_rate(version_map.trials):.0%} of boots. A range spans only releases that were tried."
    )
