"""State of a bug over nights, from the verdicts of its runs and `clean_streak`.

Only conclusive runs count: a crash of this bug, or boots that all crossed the trigger and lived.
The boots of a release count together, and releases follow each other by version: when they ran does
not matter. Hosts are tracked apart, since a bug may need one kind of GPU; so are nightly builds and
releases, since a release branch may lack a fix of the main branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from math import log, log1p

from packaging.version import InvalidVersion, Version

from vllm_repro.report.runs import Run
from vllm_repro.verdict.statistics import ALPHA, clean_streak
from vllm_repro.verdict.verdict import Standing, Verdict, from_source

# A host without a conclusive run for so long does not count.
ABSENT = timedelta(days=14)
_WORST_FIRST = (Verdict.REPRODUCES, Verdict.FIXED, Verdict.QUIET)


@dataclass(frozen=True, kw_only=True)
class BugState:
    """State of a bug: a verdict over all its runs, and the boots behind it."""

    # reproduces, fixed, regressed (crashed where it was fixed), quiet (never crashed), inconclusive
    verdict: Verdict = Verdict.INCONCLUSIVE
    # boots that crashed, and all conclusive boots, from the first crash to the last
    crashed: int = 0
    boots: int = 0
    # quiet boots since the last crash, or all of them if none crashed
    streak: int = 0
    # the release that made the state
    release: str | None = None
    # what the bug did, in the past tense
    did: str = "died"

    @property
    def needed(self) -> int | None:
        """Return the quiet boots in a row that make a fix; None if nothing crashed."""
        return clean_streak(self.crashed, self.boots) if self.crashed else None

    @property
    def reason(self) -> str:
        """Return in words the boots that make the state."""
        release = self.release or "an unknown release"
        flaky = " (flaky)" if self.crashed < self.boots else ""
        seen = f"{self.did} in {self.crashed} of {self.boots} boots{flaky}"
        reasons = {
            Verdict.INCONCLUSIVE: "no conclusive run",
            Verdict.QUIET: f"never {self.did} here; quiet boots: {self.streak}",
            Verdict.FIXED: f"{seen}, then {self.streak} quiet in a row up to {release}",
        }
        if self.verdict is Verdict.FIXED and not self.crashed:
            return f"{release} is declared good, and lived"
        open_bug = (
            f"{seen}, last in {release}; {self.streak} of {self.needed} quiet boots for a fix"
        )
        return reasons.get(self.verdict, open_bug)


def bug_state(runs: Iterable[tuple[date, Run]]) -> BugState:
    """Return the state of one bug with one kind of evidence: that of one host and kind of build.

    A regression decides, else nightly builds before releases, and the worst host. Hosts without a
    conclusive run in the last 14 days do not count. Inconclusive without a conclusive run.

    runs: with their nights, in the order of their start.
    """
    tracks: dict[tuple[bool, str], list[tuple[date, Run]]] = {}
    for night, run in runs:
        # A commit or a folder proves nothing about a release.
        if not from_source(run.vllm_version) and (run.died is not None or run.quiet):
            is_release = not is_nightly(run.vllm_version)
            tracks.setdefault((is_release, run.host), []).append((night, run))
    ends = {key: track[-1][0] for key, track in tracks.items()}
    present = [key for key in tracks if max(ends.values()) - ends[key] <= ABSENT]
    states = [(key[0], _track_state(run for _, run in tracks[key])) for key in present]
    return min(states, key=_rank, default=(False, BugState()))[1]


def _rank(track: tuple[bool, BugState]) -> tuple[object, ...]:
    """Return the sort key of a state of one host; the smallest decides the bug's state."""
    is_release, state = track
    if state.verdict is Verdict.REGRESSED:
        return (0,)
    never_crashed = state.verdict is Verdict.QUIET
    return 1, never_crashed, is_release, _WORST_FIRST.index(state.verdict), -state.boots


def _track_state(runs: Iterable[Run]) -> BugState:
    """Return the state on one host with one kind of build."""
    releases: dict[Version, list[Run]] = {}
    for run in runs:
        releases.setdefault(_version(run.vllm_version), []).append(run)
    state = BugState()
    for _, boots in sorted(releases.items()):
        state = _after_release(state, boots)
    return state


def _after_release(state: BugState, runs: Sequence[Run]) -> BugState:
    """Return the state after the runs of the next newer release."""
    dying = [run.died for run in runs if run.died is not None]
    if not dying:
        return _after_quiet(state, sum(run.quiet for run in runs), runs[-1])
    standing = runs[-1].standing
    was_fixed = state.verdict is Verdict.FIXED and standing is not Standing.BAD
    regressed = was_fixed or standing is Standing.GOOD
    if regressed and state.verdict is not Verdict.REGRESSED:
        state = BugState(verdict=Verdict.REGRESSED)  # older crashes have another rate
    elif state.verdict is not Verdict.REGRESSED:
        state = replace(state, verdict=Verdict.REPRODUCES)
    boots = sum(arm.n for arm in dying) + sum(run.quiet for run in runs if run.died is None)
    between = state.streak if state.crashed else 0  # quiet by luck: they belong to the crash rate
    return replace(
        state,
        crashed=state.crashed + sum(arm.k for arm in dying),
        boots=state.boots + boots + between,
        streak=0,
        release=runs[-1].vllm_version,
        did=dying[-1].expected.did,
    )


def _after_quiet(state: BugState, boots: int, run: Run) -> BugState:
    """Return the state after the quiet boots of the next newer release. run: its last run."""
    if state.verdict is Verdict.FIXED:
        return state
    if run.standing is Standing.GOOD and state.verdict is not Verdict.REGRESSED:
        return BugState(verdict=Verdict.FIXED, release=run.vllm_version)
    state = replace(state, streak=state.streak + boots)
    if not state.crashed:
        return replace(state, verdict=Verdict.QUIET)
    if state.streak >= _least_needed(state) and state.streak >= (state.needed or 0):
        return replace(state, verdict=Verdict.FIXED, release=run.vllm_version)
    return state


def _least_needed(state: BugState) -> float:
    """Return a bound below `needed`, which takes too long to compute for each release."""
    if state.crashed == state.boots:
        return 0.0
    return log(ALPHA / (state.crashed * (state.crashed + 1))) / log1p(-state.crashed / state.boots)


def is_nightly(version: str | None) -> bool:
    """Return True for a build between releases, such as `0.23.1rc1.dev123+gabc`.

    `0.23.0+cu130`, `0.23.0.post1` and an unknown version are not.
    """
    return _version(version).is_prerelease


def _version(text: str | None) -> Version:
    """Return the version without its build; 0 for an unknown one, older than all others."""
    try:
        return Version(Version(text or "").public)
    except InvalidVersion:
        return Version("0")
