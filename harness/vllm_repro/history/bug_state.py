"""State of a bug over nights.

    open ─► reproduces ─► candidate fix ─► good on nightly ─► good on a release ─► closed
                ▲              │                 │                    │               │
                └──────────────┴── regressed ◄───┴────────────────────┴───────────────┘

Only conclusive runs count: a crash of this bug, or boots that all crossed the trigger and lived. Of nightlies and of releases, only the
newest version seen so far counts. Hosts are tracked apart, since a bug may need one kind of GPU; the scenario has the worst state of them.

A fix is called after as many quiet boots in a row as `statistics.clean_streak` asks for, given all boots since the bug first crashed.
Until then the first quiet boot makes a candidate, but only if every earlier boot crashed: a flaky bug has quiet nights all the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from enum import StrEnum
from math import log, log1p

from packaging.version import InvalidVersion, Version

from vllm_repro.history.runs import Build, Run, build_of
from vllm_repro.verdict.statistics import ALPHA, clean_streak
from vllm_repro.verdict.verdict import Standing

__all__ = ["BugHistory", "BugState", "StateChange", "bug_histories"]

SETTLED = 3
"""Nights for which a release must stay good before the bug is closed."""
ABSENT = timedelta(days=14)
"""A host without a conclusive run for so long no longer counts."""


class BugState(StrEnum):
    """State of a bug."""

    OPEN = "open"  # nothing conclusive yet
    REPRODUCES = "reproduces"
    CANDIDATE = "candidate fix"  # quiet, with too few boots for more
    GOOD_NIGHTLY = "good on nightly"
    GOOD_RELEASE = "good on a release"
    CLOSED = "closed"
    REGRESSED = "regressed"  # died where it was good

    @property
    def good(self) -> bool:
        """Return True if the bug is called fixed."""
        return self in (BugState.GOOD_NIGHTLY, BugState.GOOD_RELEASE, BugState.CLOSED)


@dataclass(frozen=True, kw_only=True)
class StateChange:
    """Change of state, with the night and the run that caused it. why: a sentence."""

    night: date
    run: str
    was: BugState
    state: BugState
    why: str


@dataclass(frozen=True, kw_only=True)
class BugHistory:
    """State of one scenario with one kind of evidence, and how it got there.

    crashed, boots: conclusive boots of the deciding host, from the first crash to the last. streak: quiet boots since then.
    needed: quiet boots that make a fix, None if no number is enough.
    """

    scenario: str
    evidence: str
    state: BugState
    since: date
    crashed: int
    boots: int
    streak: int
    needed: int | None
    steps: tuple[StateChange, ...]
    did: str = "died"
    """Verb for the bug, from `Expected.did`."""

    @property
    def flaky(self) -> bool:
        """Return True if some boots crashed and some did not."""
        return 0 < self.crashed < self.boots

    def as_of(self, night: date) -> BugState:
        """Return the state at the end of `night`."""
        return next((step.state for step in reversed(self.steps) if step.night <= night), BugState.OPEN)


@dataclass
class _Track:
    """State on one host with one kind of build; GOOD_RELEASE means good on this kind of build."""

    nightly: bool
    state: BugState = BugState.OPEN
    crashed: int = 0
    boots: int = 0
    streak: int = 0
    last: date = date.min
    newest: Version | None = None
    declared: bool = False
    """Good only because the scenario declares it: no crash was seen."""
    why: str = ""
    did: str = "died"

    @property
    def needed(self) -> int | None:
        return clean_streak(self.crashed, self.boots) if self.crashed else None

    def add(self, row: Run, night: date) -> bool:
        """Update from a run; return False if the run does not count."""
        died, quiet = row.died, row.quiet
        version = _version(row.vllm_version)
        if (died is None and not quiet) or (self.newest and version and version < self.newest):
            return False
        self.newest = version or self.newest
        self.last = night
        if died is not None:
            self.did = died.expected.did
            self._add_crashes(died.k, died.n, row)
        else:
            self._add_quiet(quiet, row)
        return True

    def _add_crashes(self, crashed: int, boots: int, row: Run) -> None:
        text = f"{self.did} in {crashed} of {boots} boots with {row.vllm_version or 'an unknown release'}"
        if self.state is BugState.GOOD_RELEASE or row.standing is Standing.GOOD:
            self.why = f"{text}, where it {'was good' if self.state is BugState.GOOD_RELEASE else 'is declared good'}"
            if self.state is not BugState.REGRESSED:
                self.crashed = self.boots = self.streak = 0
            self.state = BugState.REGRESSED
        elif self.state is not BugState.REGRESSED:
            self.why = text + (f", after {self.streak} quiet" if self.state is BugState.CANDIDATE else "")
            self.state = BugState.REPRODUCES
        self.crashed += crashed
        self.boots += boots + self.streak  # the quiet boots were luck and belong to the crash rate
        self.streak = 0
        self.declared = False

    def _add_quiet(self, boots: int, row: Run) -> None:
        if self.state is BugState.GOOD_RELEASE:
            return
        if self.state is BugState.OPEN:
            if row.standing is Standing.GOOD:
                self.state, self.declared = BugState.GOOD_RELEASE, True
                self.why = f"{row.vllm_version} is declared good, and lived"
            return
        self.streak += boots
        always_crashed = self.crashed == self.boots
        if not always_crashed and self.streak < self._least_needed():
            return
        needed = self.needed
        seen = (
            f"{self.streak} quiet with the trigger crossed, after it {self.did} in {self.crashed} of {self.boots} boots"
        )
        if needed is not None and self.streak >= needed:
            self.state = BugState.GOOD_RELEASE
            self.why = f"{seen}: {needed} were needed (with {row.vllm_version})"
        elif always_crashed:
            self.state = BugState.CANDIDATE
            self.why = f"{seen}: {f'{needed} are needed' if needed else 'no number is enough'} before it is a fix"

    def _least_needed(self) -> float:
        """Return a bound below `needed`. The exact one takes time in proportion to the boots, too long to compute every night."""
        return log(ALPHA / (self.crashed * (self.crashed + 1))) / log1p(-self.crashed / self.boots)


_ORDER = (BugState.REGRESSED, BugState.REPRODUCES, BugState.CANDIDATE, BugState.GOOD_RELEASE)


def bug_histories(rows: Iterable[tuple[date, Run]]) -> list[BugHistory]:
    """Return the history of each scenario and evidence, sorted. `rows` come with their nights, in any order."""
    of: dict[tuple[str, str], list[tuple[date, Run]]] = {}
    for night, row in sorted(rows, key=lambda pair: (pair[1].started_at, pair[1].id)):
        of.setdefault((row.scenario, row.evidence), []).append((night, row))
    return [_history(*key, those) for key, those in sorted(of.items())]


def _history(scenario: str, evidence: str, rows: Sequence[tuple[date, Run]]) -> BugHistory:
    tracks: dict[tuple[str, bool], _Track] = {}
    state, steps = BugState.OPEN, list[StateChange]()
    settling: set[date] = set()
    for night, row in rows:
        build = build_of(row.vllm_version)
        if build is Build.SOURCE:  # somebody's own tree says nothing about a release
            continue
        nightly = build is Build.NIGHTLY
        track = tracks.setdefault((row.host, nightly), _Track(nightly=nightly))
        if not track.add(row, night):
            continue
        now = _together(tracks.values(), night)
        if now is BugState.GOOD_RELEASE and state in (BugState.GOOD_RELEASE, BugState.CLOSED):
            settling.add(night)
            now = BugState.CLOSED if state is BugState.CLOSED or len(settling) > SETTLED else now
        elif now is BugState.GOOD_RELEASE:
            settling = {night}
        if now is not state:
            why = f"quiet for {SETTLED} more nights" if now is BugState.CLOSED and not track.declared else track.why
            steps.append(StateChange(night=night, run=row.id, was=state, state=now, why=why))
            state = now
    leading = _leading(tracks.values())
    return BugHistory(
        scenario=scenario,
        evidence=evidence,
        state=state,
        since=steps[-1].night if steps else rows[0][0],
        crashed=leading.crashed,
        boots=leading.boots,
        streak=leading.streak,
        needed=leading.needed,
        steps=tuple(steps),
        did=leading.did,
    )


def _together(tracks: Iterable[_Track], night: date) -> BugState:
    """Combine the states of all hosts, with nightlies and with releases."""
    present = [track for track in tracks if track.state is not BugState.OPEN and night - track.last <= ABSENT]
    if not present:
        return BugState.OPEN
    if all(track.declared for track in present):
        return BugState.CLOSED
    with_nightly = _worst(track for track in present if track.nightly)
    with_release = _worst(track for track in present if not track.nightly)
    if BugState.REGRESSED in (with_nightly, with_release):
        return BugState.REGRESSED
    if with_nightly is None:
        return with_release or BugState.OPEN
    if with_nightly is BugState.GOOD_RELEASE and with_release is not BugState.GOOD_RELEASE:
        return BugState.GOOD_NIGHTLY
    return with_nightly


def _worst(tracks: Iterable[_Track]) -> BugState | None:
    return min((track.state for track in tracks), key=_ORDER.index, default=None)


def _leading(tracks: Iterable[_Track]) -> _Track:
    """Return the deciding track: nightlies before releases, then the worst, then the one with most boots."""
    seen = [track for track in tracks if track.state is not BugState.OPEN]

    def rank(track: _Track) -> tuple[bool, int, int]:
        return not track.nightly, _ORDER.index(track.state), -track.boots

    return min(seen, key=rank, default=_Track(nightly=False))


def _version(text: str | None) -> Version | None:
    try:
        return Version(Version(text or "").public)
    except InvalidVersion:
        return None
