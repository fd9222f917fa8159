"""Throughput over nights: one series per arm, load, host and set of flags, and the changes of its level.

Rule: three nights in a row lie outside the limits, on the same side. The limits are three robust standard deviations (at least 3 %) around
the median of the 28 nights before, of which at least 14 must be measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from statistics import median

from vllm_repro.evidence import Evidence
from vllm_repro.history.rows import Figure, RunRow
from vllm_repro.verdict.throughput import Point

__all__ = [
    "IN_A_ROW",
    "LEAST_REFERENCE",
    "QUANTITY",
    "Change",
    "Direction",
    "Measured",
    "Series",
    "newest",
    "throughput",
]

IN_A_ROW = 3
LEAST_REFERENCE, MOST_REFERENCE = 14, 28
_LIMIT, _LEAST_LIMIT = 3 * 1.4826, 0.03
"""Median absolute deviations from the reference; 1.4826 of them are a standard deviation of normal noise. And the least, as a fraction."""

QUANTITY = "output_tok_s"


class Direction(StrEnum):
    """Direction of a change."""

    SLOWER = "slower"
    FASTER = "faster"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One night of a series in tokens a second: median, quartiles, number of rounds."""

    night: date
    median: float
    low: float
    high: float
    n: int


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


@dataclass(frozen=True, kw_only=True)
class Series:
    """Nights that are compared with each other, oldest first, and the changes of their level. setup: hash of the arm's flags."""

    scenario: str
    arm: str
    point: Point
    host: str
    setup: str
    nights: tuple[Measured, ...]
    changes: tuple[Change, ...]


def throughput(rows: Iterable[tuple[date, RunRow]]) -> list[Series]:
    """Return the series of GPU runs, sorted. `rows` come with their nights."""
    found: dict[tuple[str, str, Point, str, str], dict[date, list[Figure]]] = {}
    for night, row in rows:
        for arm in row.arms if row.evidence == Evidence.GPU else ():
            for figure in arm.figures:
                if figure.quantity == QUANTITY and figure.median > 0:
                    key = (row.scenario, arm.name, figure.point, row.host, arm.setup)
                    found.setdefault(key, {}).setdefault(night, []).append(figure)
    series: list[Series] = []
    for (scenario, name, point, host, setup), figures in sorted(found.items()):
        nights = tuple(_night(night, own) for night, own in sorted(figures.items()))
        changes = tuple(_changes(nights))
        series.append(
            Series(scenario=scenario, arm=name, point=point, host=host, setup=setup, nights=nights, changes=changes)
        )
    return series


def newest(series: Iterable[Series]) -> list[Series]:
    """Return the series to show: for arms whose flags were edited, only the newest set of flags."""
    latest: dict[tuple[str, str, Point, str], Series] = {}
    for one in sorted(series, key=lambda one: one.nights[-1].night):
        latest[one.scenario, one.arm, one.point, one.host] = one
    return [one for _, one in sorted(latest.items())]


def _night(night: date, figures: Sequence[Figure]) -> Measured:
    return Measured(
        night=night,
        median=median(one.median for one in figures),
        low=min(one.low for one in figures),
        high=max(one.high for one in figures),
        n=sum(one.n for one in figures),
    )


def _changes(nights: Sequence[Measured]) -> Iterator[Change]:
    if len(nights) < LEAST_REFERENCE + IN_A_ROW:
        return
    import pandas as pd  # here: importing pandas takes half a second, and most commands do not need it

    values = pd.Series([seen.median for seen in nights])
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
                since=nights[place - IN_A_ROW + 1].night,
                called=nights[place].night,
                ratio=float(level[place] / reference[place]),
                reference=float(reference[place]),
                low=float(reference[place] - limit[place]),
                high=float(reference[place] + limit[place]),
                nights=min(MOST_REFERENCE, place - IN_A_ROW + 1),
            )
