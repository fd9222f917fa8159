"""The nightly page: an `Account` as one file of HTML that fetches nothing. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from urllib.parse import quote

from vllm_repro.history.account import Account, Kind, News
from vllm_repro.history.life import Life
from vllm_repro.history.marks import MARKS, Cell, Mark
from vllm_repro.history.telling import (
    SIMULATED,
    evidence_word,
    life_text,
    lone_text,
    summary,
    suspect_text,
)
from vllm_repro.history.trend import Change, Measured, Series, latest_of
from vllm_repro.report.document import asset, document, fragment

__all__ = ["page"]

_TONES = {
    Kind.REGRESSED: "bad",
    Kind.SLOWER: "bad",
    Kind.DIED_OTHERWISE: "bad",
    Kind.FIX: "good",
    Kind.FASTER: "good",
    Kind.CANDIDATE: "warn",
    Kind.LIFE: "dull",
    Kind.MISSING: "warn",
}
_LIFE_TONES = {Life.REGRESSED: "bad", Life.REPRODUCES: "warn", Life.CANDIDATE: "warn", Life.OPEN: "dull"}
_MARK_TONES = {
    Mark.REGRESSED: "bad",
    Mark.CHANGED: "bad",
    Mark.REPRODUCES: "warn",
    Mark.QUIET: "good",
    Mark.FIXED: "good",
}
_WIDE, _HIGH, _PAD = 210, 44, 3
_SCALE = 0.2
"""A chart reaches so far above and below the median of its nights."""
_MOST_NIGHTS = 70


@dataclass(frozen=True)
class _Item:
    word: str
    tone: str
    scenario: str
    evidence: str
    text: str
    link: str


@dataclass(frozen=True)
class _Square:
    letter: str
    tone: str
    says: str
    link: str


@dataclass(frozen=True)
class _Row:
    scenario: str
    evidence: str
    life: str
    tone: str
    since: date
    squares: tuple[_Square, ...]
    rests_on: str


@dataclass(frozen=True)
class _Chart:
    """Lengths in the picture's own units. band: x, y, width and height of the limits that a change was held
    against; whiskers: x, y and y of each night's quartiles."""

    says: str
    now: str
    points: str
    whiskers: tuple[tuple[float, float, float], ...]
    band: tuple[float, float, float, float] | None
    changed: float | None
    tone: str


@dataclass(frozen=True)
class _Arm:
    name: str
    charts: tuple[_Chart | None, ...]


@dataclass(frozen=True)
class _Trend:
    scenario: str
    moved: bool
    arms: tuple[_Arm, ...]


def page(of: Account, way: str, notice: str = "", near: Mapping[str, str] | None = None) -> str:
    """The whole page. way: from it to the folder of all runs, for its links. notice: what stands above everything else. near: by run, the
    link to what lies beside the page and is read in its stead."""
    links = _Links(way, near or {})
    values = {
        "summary": summary(of) if of.nights else "no run is in the history yet",
        "banner": notice or (SIMULATED if of.simulated else ""),
        "since": of.since,
        "last": of.nights[-1] if of.nights else None,
        "news": [_item(one, links) for one in of.news],
        "suspects": [suspect_text(one, of) for one in of.suspects],
        "lone": [lone_text(one, of) for one in of.lone],
        "nights": [(night, not place or night.day == 1) for place, night in enumerate(of.shown)],
        "rows": _rows(of, links),
        "legend": [(mark.value, _MARK_TONES.get(mark, "dull"), says) for mark, says in MARKS.items()],
        "hosts": [
            (host, hardware, any(one.host == host for one in of.suspects)) for host, hardware in of.hosts.items()
        ],
        "trends": _trends(of),
        "wide": _WIDE,
        "high": _HIGH,
        "scale": f"{_SCALE:.0%}",
        "most": _MOST_NIGHTS,
    }
    title = f"Nights to {of.nights[-1]:%Y-%m-%d}" if of.nights else "Nights"
    return document(title=title, body=fragment("history.html", **values), style=asset("history.css"))


@dataclass(frozen=True)
class _Links:
    way: str
    near: Mapping[str, str]

    def to(self, run: str) -> str:
        return quote(self.near.get(run, f"{self.way}/{run}/")) if run else ""


def _item(news: News, links: _Links) -> _Item:
    return _Item(
        news.kind.value, _TONES[news.kind], news.scenario, evidence_word(news.evidence), news.text, links.to(news.run)
    )


def _rows(of: Account, links: _Links) -> list[_Row]:
    found: list[_Row] = []
    for life in of.lives:
        key = (life.scenario, life.evidence)
        if key in of.rows:
            tone = "good" if life.life.good else _LIFE_TONES[life.life]
            squares = tuple(_square(cell, links) for cell in of.rows[key])
            found.append(
                _Row(life.scenario, evidence_word(life.evidence), life.life, tone, life.since, squares, life_text(life))
            )
    return found


def _square(cell: Cell, links: _Links) -> _Square:
    says = f"{cell.night:%Y-%m-%d}: {MARKS[cell.mark]}"
    if cell.mixed:
        says += ", and another run of that night something else"
    if cell.surprise:
        says += "; not what is declared"
    tone = "bad" if cell.surprise else _MARK_TONES.get(cell.mark, "dull")
    letter = cell.mark + ("!" if cell.surprise else "")
    return _Square(letter, tone, says, links.to(cell.runs[0]) if cell.runs else "")


def _trends(of: Account) -> list[_Trend]:
    """By scenario, a row for each arm and load, a chart for each host."""
    series = latest_of(of.trends, tuple({life.scenario for life in of.lives}))
    found: list[_Trend] = []
    recent = set(of.nights[-_MOST_NIGHTS:])
    for scenario in dict.fromkeys(one.scenario for one in series):
        mine = [one for one in series if one.scenario == scenario]
        loads = dict.fromkeys((one.arm, one.point) for one in mine)
        arms = tuple(
            _Arm(
                f"{arm}, {point}",
                tuple(
                    next(
                        (_chart(one, of) for one in mine if (one.arm, one.point, one.host) == (arm, point, host)), None
                    )
                    for host in of.hosts
                ),
            )
            for arm, point in loads
        )
        moved = any(change.series.scenario == scenario and change.called in recent for change in of.trends.changes)
        found.append(_Trend(scenario, moved, arms))
    return found


def _chart(one: Series, of: Account) -> _Chart | None:
    first = of.nights[-_MOST_NIGHTS:][0]
    nights = [seen for seen in of.trends.series[one] if seen.night >= first]
    if not nights:
        return None
    middle = sorted(seen.median for seen in nights)[len(nights) // 2]
    across = _Across(first, of.nights[-1])
    changes = [change for change in of.trends.changes if change.series == one and change.since >= first]
    change = changes[-1] if changes else None
    last = nights[-1]
    says = f"{one.arm} on {one.host}: {last.median:,.0f} tok/s on {last.night:%Y-%m-%d} ({last.low:,.0f} to {last.high:,.0f})"
    return _Chart(
        says + (f"; {abs(change.ratio - 1):.1%} {change.direction} since {change.since:%Y-%m-%d}" if change else ""),
        f"{last.median:,.0f}",
        " ".join(f"{across.x(seen.night):g},{_y(seen.median, middle):g}" for seen in nights),
        tuple((across.x(seen.night), _y(seen.high, middle), _y(seen.low, middle)) for seen in nights),
        _band(change, nights, across, middle) if change and not change.relative else None,
        across.x(change.since) if change else None,
        "" if change is None or change.lone else "good" if change.ratio > 1 else "bad",
    )


@dataclass(frozen=True)
class _Across:
    first: date
    last: date

    def x(self, night: date) -> float:
        days = max((self.last - self.first).days, 1)
        return round(_PAD + (_WIDE - 2 * _PAD) * (night - self.first).days / days, 1)


def _y(value: float, middle: float) -> float:
    away = max(-_SCALE, min(_SCALE, value / middle - 1))
    return round(_HIGH / 2 - away / _SCALE * (_HIGH / 2 - _PAD), 1)


def _band(
    change: Change, nights: Sequence[Measured], across: _Across, middle: float
) -> tuple[float, float, float, float]:
    begins = [seen.night for seen in nights if seen.night < change.since][-change.nights :]
    left, right = across.x(begins[0] if begins else change.since), across.x(change.since)
    top, bottom = _y(change.high, middle), _y(change.low, middle)
    return left, top, round(right - left, 1), round(bottom - top, 1)
