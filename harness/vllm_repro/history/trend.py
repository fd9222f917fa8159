"""Throughput over nights: which arm got slower or faster, and which host did. Pure.

A series is one arm at one load on one host with one setup; each night gives it one value, the median of its runs' medians. Its reference is
up to 28 earlier nights at the same level: their median, and their spread (the median absolute deviation, scaled to a normal's standard
deviation, and never less than 1 %). A night is outside when it is more than three spreads away. The third night in a row that is outside
on the same side is a change; those three nights begin the next level. A night without a measurement neither adds to a row nor ends it.

A host has moved in a night when everything on it did: the median over its scenarios (over the arms, where it has only one scenario) is
outside by the same rule, and each of them moved the same way by at least half of it. Unless the other hosts moved along, that night's
values are taken relative to the host, so that no arm is blamed for it, and after the third night in a row the host is named.

Changes of one arm within two weeks are one call, whatever hosts and loads they were seen on. What one host shows and another one with the
same hardware does not is no call: the arm is the same on both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from enum import StrEnum
from math import exp, log
from statistics import median

from vllm_repro.history.rows import Figure, RunRow
from vllm_repro.verdict.throughput import Point

__all__ = ["Call", "Change", "Direction", "Measured", "Series", "Suspect", "Trends", "latest_of", "trends"]

IN_A_ROW = 3
LEAST_REFERENCE, MOST_REFERENCE = 14, 28
_SOON, _LEAST_HOST_REFERENCE = 5, 8
"""A host is judged from less: it must be known before the first of its series is, and all of it says more than one series."""
SPREADS = 3.0
_LEAST_SPREAD, _LEAST_HOST_SPREAD = 0.01, 0.007
_SAME_CALL = timedelta(days=14)
_HALF = 0.5
_OF_A_NORMAL = 1.4826
"""The median absolute deviation of a normal distribution, times this, is its standard deviation."""

JUDGED = "output_tok_s"


class Direction(StrEnum):
    SLOWER = "slower"
    FASTER = "faster"


@dataclass(frozen=True, order=True)
class Series:
    scenario: str
    arm: str
    point: Point
    host: str
    setup: str


@dataclass(frozen=True)
class Measured:
    """One night of a series, in tokens a second: median, quartiles, rounds. version: of the vLLM that was measured."""

    night: date
    median: float
    low: float
    high: float
    n: int
    version: str | None


@dataclass(frozen=True)
class Change:
    """A series at a new level. since: the first of the three nights; called: the third. ratio: new level over reference.

    reference: the median of the earlier nights, the limits on either side of it beyond which a night is outside, and how many nights they
    were. relative: whether the host had moved, so that reference and limits are as they would be if it had not. same_vllm: whether the last
    reference night ran the very version of the first night outside: then it is not vLLM that changed.
    """

    series: Series
    direction: Direction
    since: date
    called: date
    ratio: float
    reference: float
    low: float
    high: float
    nights: int
    relative: bool
    same_vllm: bool
    lone: bool = False
    """Whether a host with the same hardware measured the same in those nights and did not move: then it is no call."""


@dataclass(frozen=True)
class Call:
    """An arm that got slower or faster: `changes` are where it was seen, in the order of nights."""

    scenario: str
    arm: str
    direction: Direction
    changes: tuple[Change, ...]

    @property
    def since(self) -> date:
        return min(one.since for one in self.changes)

    @property
    def called(self) -> date:
        return min(one.called for one in self.changes)

    @property
    def ratio(self) -> float:
        return median(one.ratio for one in self.changes)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.series.host for one in self.changes))


@dataclass(frozen=True)
class Suspect:
    """A host on which everything moved together, relative to its own earlier nights. last: the last night on which it was so.

    alone: no other host was there to compare with, so that it may as well be vLLM.
    """

    host: str
    direction: Direction
    since: date
    called: date
    last: date
    ratio: float
    moved: int
    alone: bool


@dataclass(frozen=True)
class Trends:
    """hardware: of each host. changes: also the lone ones, of which no call is made."""

    series: Mapping[Series, tuple[Measured, ...]]
    hardware: Mapping[str, str]
    changes: tuple[Change, ...]
    suspects: tuple[Suspect, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        found: list[Call] = []
        for change in sorted((one for one in self.changes if not one.lone), key=lambda one: (one.called, one.series)):
            arm = (change.series.scenario, change.series.arm, change.direction)
            for place, call in enumerate(found):
                if (call.scenario, call.arm, call.direction) == arm and change.since - call.since <= _SAME_CALL:
                    found[place] = replace(call, changes=(*call.changes, change))
                    break
            else:
                found.append(Call(*arm, (change,)))
        return tuple(found)

    @property
    def lone(self) -> tuple[Change, ...]:
        return tuple(one for one in self.changes if one.lone)


def _series_of(rows: Iterable[tuple[date, RunRow]]) -> dict[Series, tuple[Measured, ...]]:
    """What was measured on GPUs, by series and in the order of nights."""
    found: dict[Series, dict[date, list[tuple[Figure, str | None]]]] = {}
    for night, row in rows:
        for arm in row.arms if row.evidence == "gpu" else ():
            for figure in arm.figures or ():
                if figure.quantity == JUDGED and figure.median > 0:
                    series = Series(row.scenario, arm.name, figure.point, row.host, arm.setup)
                    found.setdefault(series, {}).setdefault(night, []).append((figure, row.version))
    return {
        series: tuple(_night(night, figures) for night, figures in sorted(nights.items()))
        for series, nights in sorted(found.items())
    }


def _night(night: date, figures: Sequence[tuple[Figure, str | None]]) -> Measured:
    those = [figure for figure, _ in figures]
    return Measured(
        night,
        median(one.median for one in those),
        min(one.low for one in those),
        max(one.high for one in those),
        sum(one.n for one in those),
        figures[-1][1],
    )


@dataclass
class _Level:
    """Nights at one level, as logarithms; `outside` are the last ones, which do not fit."""

    spread_floor: float
    least: int
    inside: list[float] = field(default_factory=list)
    outside: list[tuple[date, float]] = field(default_factory=list)

    @property
    def reference(self) -> list[float]:
        return self.inside[-MOST_REFERENCE:]

    @property
    def ready(self) -> bool:
        return len(self.inside) >= self.least

    @property
    def middle(self) -> float:
        return median(self.reference)

    @property
    def spread(self) -> float:
        middle = self.middle
        deviation = median(abs(value - middle) for value in self.reference)
        return max(_OF_A_NORMAL * deviation, self.spread_floor)

    def is_outside(self, value: float) -> bool:
        return self.ready and abs(value - self.middle) > SPREADS * self.spread

    def needed(self, value: float) -> int:
        """Nights in a row on the side of `value` that make a change: one more than three for each reference night on that side outside."""
        middle, limit = self.middle, SPREADS * self.spread
        stray = sum((one > middle) is (value > middle) and abs(one - middle) > limit for one in self.reference)
        return IN_A_ROW + stray

    def take(self, night: date, value: float) -> bool:
        """Adds a night; whether the row of those outside on one side is now long enough."""
        if not self.is_outside(value):
            self._settle()
            self.inside.append(value)
            return False
        if self.outside and (self.outside[-1][1] > self.middle) is not (value > self.middle):
            self._settle()
        self.outside.append((night, value))
        return len(self.outside) >= self.needed(value)

    def _settle(self) -> None:
        """What was outside and did not last belongs to the ordinary nights."""
        self.inside += [value for _, value in self.outside]
        self.outside = []

    def restart(self) -> None:
        self.inside, self.outside = [value for _, value in self.outside], []


@dataclass
class _Host:
    """How far all of a host was from its reference, night by night."""

    level: _Level = field(default_factory=lambda: _Level(_LEAST_HOST_SPREAD, _LEAST_HOST_REFERENCE))
    moves: list[tuple[date, float, int]] = field(default_factory=list)
    """The present row of nights on which it moved, how far, and how many series."""
    named: int | None = None
    """Where in the list of suspects it stands, while it goes on."""


def latest_of(trend: Trends, scenarios: Sequence[str] = ()) -> list[Series]:
    """The series to show, in order; of an arm whose flags were changed only the newest setup."""
    newest: dict[tuple[object, ...], Series] = {}
    for one, nights in trend.series.items():
        key = (one.scenario, one.arm, one.point, one.host)
        held = newest.get(key)
        if held is None or trend.series[held][-1].night < nights[-1].night:
            newest[key] = one
    return [one for one in sorted(newest.values()) if not scenarios or one.scenario in scenarios]


def trends(rows: Sequence[tuple[date, RunRow]]) -> Trends:
    """The series in `rows`, which come with their nights, and what changed in them."""
    series = _series_of(rows)
    hardware = {row.host: row.hardware for _, row in rows}
    values = {one: {seen.night: seen for seen in nights} for one, nights in series.items()}
    levels = {one: _Level(_LEAST_SPREAD, LEAST_REFERENCE) for one in series}
    relative: dict[Series, dict[date, float]] = {one: {} for one in series}
    hosts = {one.host: _Host() for one in series}
    changes: list[Change] = []
    suspects: list[Suspect] = []
    for night in sorted({seen.night for nights in series.values() for seen in nights}):
        tonight = {one: log(nights[night].median) for one, nights in values.items() if night in nights}
        away = {one: value - levels[one].middle for one, value in tonight.items() if len(levels[one].inside) >= _SOON}
        blamed = _blamed(hosts, away, night, suspects)
        for one, value in tonight.items():
            relative[one][night] = value - blamed.get(one.host, 0.0)
        moved = [one for one in tonight if levels[one].take(night, relative[one][night])]
        found = [_change(one, levels[one], values[one], relative=one.host in blamed) for one in moved]
        for change in found:
            twins = [one for one in _twins(change.series, hardware, series) if levels[one].ready]
            known = [*changes, *found]
            alone = any(not _moved_too(change, one, levels[one], relative[one], known) for one in twins)
            changes.append(replace(change, lone=alone))
        for one in moved:
            levels[one].restart()
    return Trends(series, hardware, tuple(changes), tuple(suspects))


def _twins(of: Series, hardware: Mapping[str, str], series: Iterable[Series]) -> list[Series]:
    """The same on other hosts of the same hardware."""
    return [
        one
        for one in series
        if replace(one, host=of.host) == of and one != of and hardware[one.host] == hardware[of.host]
    ]


def _moved_too(
    change: Change, twin: Series, level: _Level, values: Mapping[date, float], changes: Sequence[Change]
) -> bool:
    """Whether `twin` went along with the change, or was measured too seldom in those nights to tell."""
    if any(
        one.series == twin and one.direction is change.direction and abs(one.since - change.since) <= _SAME_CALL
        for one in changes
    ):
        return True
    then = [value for night, value in values.items() if change.since <= night <= change.called]
    return len(then) < 2 or (median(then) - level.middle) / log(change.ratio) >= _HALF


def _blamed(
    hosts: Mapping[str, _Host], away: Mapping[Series, float], night: date, suspects: list[Suspect]
) -> dict[str, float]:
    """How far each host is off tonight that went its own way; `suspects` is kept up to date."""
    shifts = {host: found for host in hosts if (found := _shift(host, away)) is not None}
    blamed: dict[str, float] = {}
    for host, (shift, together, count) in shifts.items():
        state = hosts[host]
        others = [other for name, (other, *_) in shifts.items() if name != host]
        along = bool(others) and median(others) / shift >= _HALF if shift else False
        if together and not along and state.level.is_outside(shift):
            blamed[host] = shift
            _moved(host, state, (night, shift, count), suspects, alone=not others)
        else:
            if not along:
                state.level.inside.append(shift)
            state.moves, state.named = [], None
    return blamed


def _shift(host: str, away: Mapping[Series, float]) -> tuple[float, bool, int] | None:
    """How far all of a host is off tonight, whether all of it went that way, and how many series that is. None where it has too few."""
    here = {one: value for one, value in away.items() if one.host == host}
    by_scenario = len({one.scenario for one in here}) > 1
    groups: dict[str, list[float]] = {}
    for one, value in here.items():
        groups.setdefault(one.scenario if by_scenario else one.arm, []).append(value)
    if len(groups) < 2:
        return None
    parts = [median(values) for values in groups.values()]
    shift = median(parts)
    return shift, all(part / shift >= _HALF for part in parts) if shift else False, len(here)


def _moved(host: str, state: _Host, move: tuple[date, float, int], suspects: list[Suspect], *, alone: bool) -> None:
    if state.moves and (state.moves[-1][1] > 0) is not (move[1] > 0):
        state.moves, state.named = [], None
    state.moves.append(move)
    if len(state.moves) < IN_A_ROW:
        return
    direction = Direction.FASTER if move[1] > 0 else Direction.SLOWER
    ratio = exp(median(shift for _, shift, _ in state.moves))
    called = state.moves[IN_A_ROW - 1][0]
    found = Suspect(host, direction, state.moves[0][0], called, move[0], ratio, move[2], alone)
    if state.named is None:
        state.named = len(suspects)
        suspects.append(found)
    else:
        suspects[state.named] = found


def _change(one: Series, level: _Level, nights: Mapping[date, Measured], *, relative: bool) -> Change:
    middle, limit = level.middle, SPREADS * level.spread
    ratio = exp(median(value for _, value in level.outside) - middle)
    since, called = level.outside[0][0], level.outside[-1][0]
    before = [seen.version for night, seen in nights.items() if night < since]
    return Change(
        one,
        Direction.FASTER if ratio > 1 else Direction.SLOWER,
        since,
        called,
        ratio,
        exp(middle),
        exp(middle - limit),
        exp(middle + limit),
        len(level.reference),
        relative,
        bool(before) and before[-1] is not None and before[-1] == nights[since].version,
    )
