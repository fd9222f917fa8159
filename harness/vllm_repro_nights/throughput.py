"""Throughput over nights: one series per arm, load, host and set of flags, and the changes of its level.

Rule: three nights in a row lie outside the limits, on the same side. The limits are three robust standard deviations (at least 3 %) around
the median of the 28 nights before, of which at least 14 must be measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from statistics import median

from vllm_repro.report.runs import Run
from vllm_repro.verdict.throughput import Point
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_nights.setups import setup_of

__all__ = ["IN_A_ROW", "LEAST_REFERENCE", "Change", "Direction", "Series", "newest", "throughput"]

IN_A_ROW = 3
LEAST_REFERENCE, MOST_REFERENCE = 14, 28
_LIMIT, _LEAST_LIMIT = 3 * 1.4826, 0.03
"""Median absolute deviations from the reference; 1.4826 of them are a standard deviation of normal noise. And the least, as a fraction."""


class Direction(StrEnum):
    """Direction of a change."""

    SLOWER = "slower"
    FASTER = "faster"


@dataclass(frozen=True, kw_only=True)
class Change:
    """A new level of a series.

    since, called: first and third night outside the limits. ratio: new level over reference.
    reference, low, high: median of the nights before and its limits, in tokens a second. nights: number of those nights.
    """

    direction: Direction
    since: date
    called: date
    ratio: float
    reference: float
    low: float
    high: float
    nights: int

    @property
    def words(self) -> str:
        return f"{abs(self.ratio - 1):.1%} {self.direction} since {self.since:%Y-%m-%d}"


@dataclass(frozen=True, kw_only=True)
class Series:
    """Medians of the nights that are compared with each other, oldest first, and the changes of their level. setup: of the arm, a hash."""

    scenario: str
    arm: str
    point: Point
    host: str
    setup: str
    nights: Mapping[date, float]
    changes: tuple[Change, ...]


def throughput(rows: Iterable[tuple[date, Run]]) -> list[Series]:
    """Return the series of GPU runs, sorted. `rows` come with their nights. A boot counts as much as another."""
    found: dict[tuple[str, str, Point, str, str], dict[date, list[float]]] = {}
    for night, row in rows:
        for arm in row.arms if row.evidence == Evidence.GPU else ():
            measured = [one for trial in arm.trials if trial.throughput for one in trial.throughput.points]
            setup = setup_of(arm) if measured else ""
            for one in measured:
                if one.output_tok_s:
                    point = Point(one.prompt, one.output, one.concurrency, one.rate, one.arrivals)
                    key = (row.scenario, arm.name, point, row.host, setup)
                    found.setdefault(key, {}).setdefault(night, []).append(one.output_tok_s)
    series: list[Series] = []
    for (scenario, name, point, host, setup), speeds in sorted(found.items()):
        nights = {night: median(own) for night, own in sorted(speeds.items())}
        changes = tuple(_changes(nights))
        series.append(
            Series(scenario=scenario, arm=name, point=point, host=host, setup=setup, nights=nights, changes=changes)
        )
    return series


def newest(series: Iterable[Series]) -> list[Series]:
    """Return the series to show: for arms whose flags were edited, only the newest set of flags."""
    latest: dict[tuple[str, str, Point, str], Series] = {}
    for one in sorted(series, key=lambda one: max(one.nights)):
        latest[one.scenario, one.arm, one.point, one.host] = one
    return [one for _, one in sorted(latest.items())]


def _changes(speeds: Mapping[date, float]) -> Iterator[Change]:
    nights = list(speeds)
    if len(nights) < LEAST_REFERENCE + IN_A_ROW:
        return
    import pandas as pd  # here: importing pandas takes half a second, and most commands do not need it

    values = pd.Series(list(speeds.values()))
    before = values.shift(IN_A_ROW).rolling(MOST_REFERENCE, min_periods=LEAST_REFERENCE)
    reference = before.median()
    deviation = before.apply(lambda window: median(abs(window - median(window))), raw=True)
    limit = (_LIMIT * deviation).clip(lower=_LEAST_LIMIT * reference)
    last = values.rolling(IN_A_ROW)
    outside = {Direction.SLOWER: last.max() < reference - limit, Direction.FASTER: last.min() > reference + limit}
    level = last.median()
    for direction, is_outside in outside.items():
        called = -MOST_REFERENCE
        for place in is_outside.index[is_outside]:
            if place - called < MOST_REFERENCE:  # the reference needs so long to arrive at the new level
                continue
            called = place
            yield Change(
                direction=direction,
                since=nights[place - IN_A_ROW + 1],
                called=nights[place],
                ratio=float(level[place] / reference[place]),
                reference=float(reference[place]),
                low=float(reference[place] - limit[place]),
                high=float(reference[place] + limit[place]),
                nights=min(MOST_REFERENCE, place - IN_A_ROW + 1),
            )
