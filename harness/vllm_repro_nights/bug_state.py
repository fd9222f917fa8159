"""State of a bug over nights.

    open ─► reproduces ─► candidate fix ─► good on nightly ─► good on a release ─► closed
                ▲              │                 │                    │               │
                └──────────────┴── regressed ◄───┴────────────────────┴───────────────┘

Only conclusive runs count: a crash of this bug, or boots that all crossed the trigger and lived. The boots of a release count together,
and releases follow each other by version: when they ran does not matter. Hosts are tracked apart, since a bug may need one kind of GPU;
the scenario has the worst state of them.

A fix is called after as many quiet boots in a row as `statistics.clean_streak` asks for, given all boots since the bug first crashed.
Until then the first quiet boot makes a candidate, but only if every earlier boot crashed: a flaky bug has quiet nights all the time.
A release that is declared good and lives needs no more boots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from enum import StrEnum
from math import log, log1p

from packaging.version import InvalidVersion, Version

from vllm_repro.report.runs import Run
from vllm_repro.verdict.statistics import ALPHA, clean_streak
from vllm_repro.verdict.verdict import Standing
from vllm_repro_nights.setups import Build, build_of

__all__ = ["BugHistory", "BugState", "StateChange", "bug_histories"]

SETTLED = 4
"""Nights with quiet boots of a good release before the bug is closed."""
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
class _Release:
    """Boots of one release, or of one nightly, on one host. nights: the first `SETTLED` with a conclusive run. last: the last one."""

    name: str = "an unknown release"
    standing: Standing = Standing.UNKNOWN
    crashed: int = 0
    boots: int = 0
    did: str = "died"
    nights: frozenset[date] = frozenset()
    last: date = date.min

    def add(self, row: Run, night: date) -> None:
        self.name, self.standing = row.vllm_version or self.name, row.standing
        self.nights, self.last = _few(self.nights | {night}), max(self.last, night)
        if (died := row.died) is not None:
            self.did = died.expected.did
            self.crashed += died.k
        self.boots += row.quiet if died is None else died.n


@dataclass
class _Track:
    """State on one host with one kind of build; GOOD_RELEASE means good on this kind of build."""

    nightly: bool
    state: BugState = BugState.OPEN
    crashed: int = 0
    boots: int = 0
    streak: int = 0
    last: date = date.min
    quiet: frozenset[date] = frozenset()
    """The first `SETTLED` nights of the quiet boots in a row."""
    declared: bool = False
    """Good because the scenario declares it."""
    why: str = ""
    did: str = "died"

    @property
    def needed(self) -> int | None:
        return clean_streak(self.crashed, self.boots) if self.crashed else None

    def add(self, release: _Release) -> None:
        """Update from the next newer release."""
        self.last = max(self.last, release.last)
        if release.crashed:
            self.did = release.did
            self._add_crashes(release)
        else:
            if self.state is not BugState.OPEN:
                self.quiet = _few(self.quiet | release.nights)
            self._add_quiet(release)

    def _add_crashes(self, release: _Release) -> None:
        text = f"{self.did} in {release.crashed} of {release.boots} boots with {release.name}"
        was_good = self.state is BugState.GOOD_RELEASE and not (self.declared and release.standing is Standing.BAD)
        if was_good or release.standing is Standing.GOOD:
            self.why = f"{text}, where it {'was good' if was_good else 'is declared good'}"
            if self.state is not BugState.REGRESSED:
                self.crashed = self.boots = self.streak = 0
            self.state = BugState.REGRESSED
        elif self.state is not BugState.REGRESSED:
            self.why = text + (f", after {self.streak} quiet" if self.state is BugState.CANDIDATE else "")
            self.state = BugState.REPRODUCES
        self.crashed += release.crashed
        self.boots += release.boots + self.streak  # the quiet boots were luck and belong to the crash rate
        self.streak = 0
        self.quiet = frozenset()
        self.declared = False

    def _add_quiet(self, release: _Release) -> None:
        if self.state is BugState.GOOD_RELEASE:
            return
        if release.standing is Standing.GOOD and self.state is not BugState.REGRESSED:
            self.state, self.declared, self.quiet = BugState.GOOD_RELEASE, True, release.nights
            self.why = f"{release.name} is declared good, and lived"
            self.crashed = self.boots = self.streak = 0
            return
        if self.state is BugState.OPEN:
            return
        self.streak += release.boots
        always_crashed = self.crashed == self.boots
        if not always_crashed and self.streak < self._least_needed():
            return
        needed = self.needed
        seen = (
            f"{self.streak} quiet with the trigger crossed, after it {self.did} in {self.crashed} of {self.boots} boots"
        )
        if needed is not None and self.streak >= needed:
            self.state = BugState.GOOD_RELEASE
            self.why = f"{seen}: {needed} were needed (with {release.name})"
        elif always_crashed:
            self.state = BugState.CANDIDATE
            self.why = f"{seen}: {f'{needed} are needed' if needed else 'no number is enough'} before it is a fix"

    def _least_needed(self) -> float:
        """Return a bound below `needed`. The exact one takes time in proportion to the boots, too long to compute every night."""
        return log(ALPHA / (self.crashed * (self.crashed + 1))) / log1p(-self.crashed / self.boots)


@dataclass
class _Series:
    """Releases of one host and kind of build by version, the state before each, and the state after all."""

    track: _Track
    versions: list[Version] = field(default_factory=list)
    releases: list[_Release] = field(default_factory=list)
    before: list[_Track] = field(default_factory=list)

    def add(self, row: Run, night: date) -> None:
        """Add a run. Only its release and newer ones are counted again, so a history takes time in proportion to its nights."""
        version = _version(row.vllm_version)
        at = bisect_left(self.versions, version)
        if self.versions[at : at + 1] != [version]:
            self.versions.insert(at, version)
            self.releases.insert(at, _Release())
            self.before.insert(at, self.before[at] if at < len(self.before) else self.track)
        self.releases[at].add(row, night)
        self.track = self.before[at]
        for place in range(at, len(self.releases)):
            self.before[place], self.track = self.track, replace(self.track)
            self.track.add(self.releases[place])


def _few(nights: frozenset[date]) -> frozenset[date]:
    return nights if len(nights) <= SETTLED else frozenset(sorted(nights)[:SETTLED])


_ORDER = (BugState.REGRESSED, BugState.REPRODUCES, BugState.CANDIDATE, BugState.GOOD_RELEASE)


def bug_histories(rows: Iterable[tuple[date, Run]]) -> list[BugHistory]:
    """Return the history of each scenario and evidence, sorted. `rows` come with their nights, in any order."""
    of: dict[tuple[str, str], list[tuple[date, Run]]] = {}
    for night, row in sorted(rows, key=lambda pair: (pair[1].started_at, pair[1].id)):
        of.setdefault((row.scenario, row.evidence), []).append((night, row))
    return [_history(*key, those) for key, those in sorted(of.items())]


def _history(scenario: str, evidence: str, rows: Sequence[tuple[date, Run]]) -> BugHistory:
    series: dict[tuple[str, bool], _Series] = {}
    state, steps = BugState.OPEN, list[StateChange]()
    for night, row in rows:
        build = build_of(row.vllm_version)
        # Somebody's own tree says nothing about a release.
        if build is Build.SOURCE or (row.died is None and not row.quiet):
            continue
        key = row.host, build is Build.NIGHTLY
        own = series.setdefault(key, _Series(_Track(nightly=key[1])))
        own.add(row, night)
        tracks = [one.track for one in series.values()]
        now, why = _together(tracks, night), own.track.why
        if now is BugState.GOOD_RELEASE and len(_quiet_nights(tracks)) >= SETTLED:
            why = f"good releases were quiet in {SETTLED} nights" if state is now else why
            now = BugState.CLOSED
        if now is not state:
            steps.append(StateChange(night=night, run=row.id, was=state, state=now, why=why))
            state = now
    leading = _leading(one.track for one in series.values())
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


def _quiet_nights(tracks: Iterable[_Track]) -> frozenset[date]:
    good = (track for track in tracks if not track.nightly and track.state is BugState.GOOD_RELEASE)
    return frozenset[date]().union(*(track.quiet for track in good))


def _worst(tracks: Iterable[_Track]) -> BugState | None:
    return min((track.state for track in tracks), key=_ORDER.index, default=None)


def _leading(tracks: Iterable[_Track]) -> _Track:
    """Return the deciding track: nightlies before releases, then the worst, then the one with most boots."""
    seen = [track for track in tracks if track.state is not BugState.OPEN]

    def rank(track: _Track) -> tuple[bool, int, int]:
        return not track.nightly, _ORDER.index(track.state), -track.boots

    return min(seen, key=rank, default=_Track(nightly=False))


def _version(text: str | None) -> Version:
    """Return the version without its build; 0 for an unknown release, which counts as older than all others."""
    try:
        return Version(Version(text or "").public)
    except InvalidVersion:
        return Version("0")
