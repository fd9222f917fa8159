"""The life of a bug, night after night: where it stands, since when, and what moved it. Pure.

    open ─► reproduces ─► candidate fix ─► good on nightly ─► good on a release ─► closed
                ▲              │                 │                    │               │
                └──────────────┴── regressed ◄───┴────────────────────┴───────────────┘

Only conclusive runs move it: a death of this bug, or boots that all crossed the trigger and lived. Of nightlies and of releases only the
newest seen so far counts, or a newer one: that an old release still dies is no news, and that another old one lives neither. Hosts are
followed apart, since a bug may need one kind of GPU, and the scenario is where its worst host is.

A fix is called when the quiet boots in a row are as many as `statistics.clean_streak` asks for, given all boots since the bug was there.
Until then the first quiet boot makes a candidate, where the bug never failed to show before; where it did (a flaky one), a quiet night is
no news at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from enum import StrEnum

from packaging.version import InvalidVersion, Version

from vllm_repro.history.rows import Build, RunRow
from vllm_repro.verdict.statistics import clean_streak
from vllm_repro.verdict.verdict import Standing

__all__ = ["Life", "Lived", "Step", "lives"]

SETTLED = 3
"""Nights that a release must stay good before the bug is closed."""
ABSENT = timedelta(days=14)
"""A host that has said nothing for so long no longer holds a scenario back."""


class Life(StrEnum):
    OPEN = "open"  # nothing conclusive yet
    REPRODUCES = "reproduces"
    CANDIDATE = "candidate fix"  # quiet, and too few boots to say more
    GOOD_NIGHTLY = "good on nightly"
    GOOD_RELEASE = "good on a release"
    CLOSED = "closed"
    REGRESSED = "regressed"  # died where it was good

    @property
    def good(self) -> bool:
        return self in (Life.GOOD_NIGHTLY, Life.GOOD_RELEASE, Life.CLOSED)


@dataclass(frozen=True)
class Step:
    """A move from one state to the next, in the night and by the run that made it. why: a sentence."""

    night: date
    run: str
    was: Life
    life: Life
    why: str


@dataclass(frozen=True)
class Lived:
    """A scenario's life as one kind of evidence has it.

    crashed, boots: all conclusive boots of the host that holds it back, since the bug was there and up to its last death. streak, needed:
    quiet boots since then, and how many make a fix (None: no number of them).
    """

    scenario: str
    evidence: str
    life: Life
    since: date
    crashed: int
    boots: int
    streak: int
    needed: int | None
    steps: tuple[Step, ...]
    did: str = "died"
    """What the bug does, as `Expected.did` has it."""

    @property
    def flaky(self) -> bool:
        return 0 < self.crashed < self.boots

    def as_of(self, night: date) -> Life:
        """Where it stood at the end of `night`."""
        return next((step.life for step in reversed(self.steps) if step.night <= night), Life.OPEN)


@dataclass
class _Track:
    """One host and one kind of build. `life` is never about a release or a nightly: GOOD_RELEASE stands for good on this build."""

    build: Build
    life: Life = Life.OPEN
    crashed: int = 0
    boots: int = 0
    streak: int = 0
    last: date = date.min
    newest: Version | None = None
    declared: bool = False
    """Good only because the scenario says so of this release: it was never seen to die."""
    why: str = ""
    did: str = "died"

    @property
    def needed(self) -> int | None:
        return clean_streak(self.crashed, self.boots) if self.crashed else None

    def take(self, row: RunRow, night: date) -> bool:
        """Whether the row says anything of this track."""
        died, quiet = row.died, row.quiet
        version = _version(row.version)
        if (died is None and not quiet) or (self.newest and version and version < self.newest):
            return False
        self.newest = version or self.newest
        self.last = night
        if died is not None:
            self.did = died.expected.did
            self._died(died.crashed, died.boots, row)
        else:
            self._lived(quiet, row)
        return True

    def _died(self, crashed: int, boots: int, row: RunRow) -> None:
        told = f"{crashed} of {boots} {self.did} with {row.version or 'an unknown release'}"
        if self.life is Life.GOOD_RELEASE or row.standing is Standing.GOOD:
            self.why = f"{told}, where it {'was good' if self.life is Life.GOOD_RELEASE else 'is declared good'}"
            if self.life is not Life.REGRESSED:
                self.crashed = self.boots = self.streak = 0
            self.life = Life.REGRESSED
        elif self.life is not Life.REGRESSED:
            self.why = told + (f", after {self.streak} quiet" if self.life is Life.CANDIDATE else "")
            self.life = Life.REPRODUCES
        self.crashed += crashed
        self.boots += boots + self.streak  # its quiet boots were luck: they belong to the rate
        self.streak = 0
        self.declared = False

    def _lived(self, boots: int, row: RunRow) -> None:
        if self.life is Life.GOOD_RELEASE:
            return
        if self.life is Life.OPEN:
            if row.standing is Standing.GOOD:
                self.life, self.declared = Life.GOOD_RELEASE, True
                self.why = f"{row.version} is declared good, and lived"
            return
        never_before = self.crashed == self.boots
        self.streak += boots
        needed = self.needed
        seen = f"{self.streak} quiet with the trigger crossed, after {self.crashed} of {self.boots} {self.did}"
        if needed is not None and self.streak >= needed:
            self.life = Life.GOOD_RELEASE
            self.why = f"{seen}: {needed} were needed (with {row.version})"
        elif never_before:
            self.life = Life.CANDIDATE
            self.why = f"{seen}: {f'{needed} are needed' if needed else 'no number is enough'} before it is a fix"


_ORDER = (Life.REGRESSED, Life.REPRODUCES, Life.CANDIDATE, Life.GOOD_RELEASE)


def lives(rows: Iterable[tuple[date, RunRow]]) -> list[Lived]:
    """Of each scenario and kind of evidence in `rows`, which come with their nights, in any order. Sorted by name."""
    of: dict[tuple[str, str], list[tuple[date, RunRow]]] = {}
    for night, row in sorted(rows, key=lambda pair: (pair[1].started_at, pair[1].id)):
        of.setdefault((row.scenario, row.evidence), []).append((night, row))
    return [_life(*key, those) for key, those in sorted(of.items())]


def _life(scenario: str, evidence: str, rows: Sequence[tuple[date, RunRow]]) -> Lived:
    tracks: dict[tuple[str, bool], _Track] = {}
    life, steps = Life.OPEN, list[Step]()
    settling: set[date] = set()
    for night, row in rows:
        nightly = row.build is Build.NIGHTLY
        track = tracks.setdefault((row.host, nightly), _Track(row.build))
        if not track.take(row, night):
            continue
        now = _together(tracks, night)
        if now is Life.GOOD_RELEASE and life in (Life.GOOD_RELEASE, Life.CLOSED):
            settling.add(night)
            now = Life.CLOSED if life is Life.CLOSED or len(settling) > SETTLED else now
        elif now is Life.GOOD_RELEASE:
            settling = {night}
        if now is not life:
            why = f"quiet for {SETTLED} more nights" if now is Life.CLOSED and not track.declared else track.why
            steps.append(Step(night, row.id, life, now, why))
            life = now
    leading = _leading(tracks)
    since = steps[-1].night if steps else rows[0][0]
    return Lived(
        scenario,
        evidence,
        life,
        since,
        leading.crashed if leading else 0,
        leading.boots if leading else 0,
        leading.streak if leading else 0,
        leading.needed if leading else None,
        tuple(steps),
        leading.did if leading else "died",
    )


def _together(tracks: dict[tuple[str, bool], _Track], night: date) -> Life:
    """Where a scenario is, from where its hosts are with nightlies and with releases."""
    told = [(key[1], track) for key, track in tracks.items() if track.life is not Life.OPEN]
    present = [one for one in told if night - one[1].last <= ABSENT]
    nightlies = [track for nightly, track in present if nightly]
    releases = [track for nightly, track in present if not nightly]
    if not present:
        return Life.OPEN
    if all(track.declared for _, track in present):
        return Life.CLOSED
    with_nightly, with_release = _worst(nightlies), _worst(releases)
    if Life.REGRESSED in (with_nightly, with_release):
        return Life.REGRESSED
    if with_nightly is None:
        return with_release or Life.OPEN
    if with_nightly is Life.GOOD_RELEASE and with_release is not Life.GOOD_RELEASE:
        return Life.GOOD_NIGHTLY
    return with_nightly


def _worst(tracks: Sequence[_Track]) -> Life | None:
    return min((track.life for track in tracks), key=_ORDER.index, default=None)


def _leading(tracks: dict[tuple[str, bool], _Track]) -> _Track | None:
    """The one that holds the scenario back: the worst, with nightlies before releases, and of those the one with most boots."""
    told = [(not nightly, track) for (_, nightly), track in tracks.items() if track.life is not Life.OPEN]
    ordered = sorted(told, key=lambda one: (one[0], _ORDER.index(one[1].life), -one[1].boots))
    return ordered[0][1] if ordered else None


def _version(text: str | None) -> Version | None:
    try:
        return Version(Version(text or "").public)
    except InvalidVersion:
        return None
