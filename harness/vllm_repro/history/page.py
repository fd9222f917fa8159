"""The nightly page: a `Summary` as one HTML file that loads nothing from the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from urllib.parse import quote

from vllm_repro.history.bug_state import BugState
from vllm_repro.history.nights import MARKS, Cell, Mark
from vllm_repro.history.summary import News, NewsKind, Summary
from vllm_repro.history.text import SIMULATED, evidence_word, headline, state_text
from vllm_repro.history.throughput import Change, Measured, Series, newest
from vllm_repro.report.document import asset, document, fragment

__all__ = ["page"]

_TONES = {
    NewsKind.REGRESSED: "bad",
    NewsKind.SLOWER: "bad",
    NewsKind.DIED_OTHERWISE: "bad",
    NewsKind.FIX: "good",
    NewsKind.FASTER: "good",
    NewsKind.CANDIDATE: "warn",
    NewsKind.STATE: "dull",
    NewsKind.MISSING: "warn",
}
_STATE_TONES = {
    BugState.REGRESSED: "bad",
    BugState.REPRODUCES: "warn",
    BugState.CANDIDATE: "warn",
    BugState.OPEN: "dull",
    BugState.GOOD_NIGHTLY: "good",
    BugState.GOOD_RELEASE: "good",
    BugState.CLOSED: "good",
}
_MARK_TONES = {
    Mark.REGRESSED: "bad",
    Mark.CHANGED: "bad",
    Mark.REPRODUCES: "warn",
    Mark.QUIET: "good",
    Mark.FIXED: "good",
}
_WIDE, _HIGH, _PAD = 210, 44, 3
_SCALE = 0.2
"""Range of a chart, above and below the median of its nights."""
_MOST_NIGHTS = 70


@dataclass(frozen=True, kw_only=True)
class _Item:
    word: str
    tone: str
    scenario: str
    evidence: str
    text: str
    link: str


@dataclass(frozen=True, kw_only=True)
class _Square:
    letter: str
    tone: str
    says: str
    link: str


@dataclass(frozen=True, kw_only=True)
class _Row:
    scenario: str
    evidence: str
    state: str
    tone: str
    since: date
    squares: tuple[_Square, ...]
    rests_on: str


@dataclass(frozen=True, kw_only=True)
class _Chart:
    """Chart of one series, with lengths in SVG units.

    band: x, y, width and height of the limits of a change. whiskers: x, top and bottom of each night's quartiles.
    """

    says: str
    now: str
    points: str
    whiskers: tuple[tuple[float, float, float], ...]
    band: tuple[float, float, float, float] | None
    changed: float | None
    tone: str


@dataclass(frozen=True, kw_only=True)
class _Arm:
    name: str
    charts: tuple[_Chart | None, ...]


@dataclass(frozen=True, kw_only=True)
class _Trend:
    scenario: str
    moved: bool
    arms: tuple[_Arm, ...]


def page(of: Summary, way: str, notice: str = "", near: Mapping[str, str] | None = None) -> str:
    """Return the page.

    way: link from it to the folder of all runs. notice: banner. near: links that replace those to some runs, by run.
    """
    links = _Links(way=way, near=near or {})
    values = {
        "summary": headline(of) if of.nights else "no run is in the history yet",
        "banner": notice or (SIMULATED if of.simulated else ""),
        "since": of.since,
        "last": of.nights[-1] if of.nights else None,
        "news": [_item(one, links) for one in of.news],
        "nights": [(night, not place or night.day == 1) for place, night in enumerate(of.shown)],
        "rows": _rows(of, links),
        "legend": [(mark.value, _MARK_TONES.get(mark, "dull"), says) for mark, says in MARKS.items()],
        "hosts": list(of.hosts.items()),
        "trends": _trends(of),
        "wide": _WIDE,
        "high": _HIGH,
        "scale": f"{_SCALE:.0%}",
        "most": _MOST_NIGHTS,
    }
    title = f"Nights to {of.nights[-1]:%Y-%m-%d}" if of.nights else "Nights"
    return document(title=title, body=fragment("history.html", **values), style=asset("history.css"))


@dataclass(frozen=True, kw_only=True)
class _Links:
    way: str
    near: Mapping[str, str]

    def to(self, run: str) -> str:
        return quote(self.near.get(run, f"{self.way}/{run}/")) if run else ""


def _item(news: News, links: _Links) -> _Item:
    return _Item(
        word=news.kind.value,
        tone=_TONES[news.kind],
        scenario=news.scenario,
        evidence=evidence_word(news.evidence),
        text=news.text,
        link=links.to(news.run),
    )


def _rows(of: Summary, links: _Links) -> list[_Row]:
    found: list[_Row] = []
    for bug in of.bugs:
        if cells := of.rows.get((bug.scenario, bug.evidence)):
            found.append(
                _Row(
                    scenario=bug.scenario,
                    evidence=evidence_word(bug.evidence),
                    state=bug.state,
                    tone=_STATE_TONES[bug.state],
                    since=bug.since,
                    squares=tuple(_square(cell, links) for cell in cells),
                    rests_on=state_text(bug),
                )
            )
    return found


def _square(cell: Cell, links: _Links) -> _Square:
    says = f"{cell.night:%Y-%m-%d}: {MARKS[cell.mark]}"
    if cell.mixed:
        says += ", and another run of that night something else"
    if cell.surprise:
        says += "; not as declared"
    tone = "bad" if cell.surprise else _MARK_TONES.get(cell.mark, "dull")
    letter = cell.mark + ("!" if cell.surprise else "")
    return _Square(letter=letter, tone=tone, says=says, link=links.to(cell.runs[0]) if cell.runs else "")


def _trends(of: Summary) -> list[_Trend]:
    """Return a row for each arm and load, with a chart for each host, by scenario."""
    series = newest(of.throughput)
    found: list[_Trend] = []
    recent = set(of.nights[-_MOST_NIGHTS:])
    for scenario in dict.fromkeys(one.scenario for one in series):
        mine = [one for one in series if one.scenario == scenario]
        loads = dict.fromkeys((one.arm, one.point) for one in mine)
        arms = tuple(
            _Arm(
                name=f"{arm}, {point}",
                charts=tuple(
                    next(
                        (_chart(one, of) for one in mine if (one.arm, one.point, one.host) == (arm, point, host)), None
                    )
                    for host in of.hosts
                ),
            )
            for arm, point in loads
        )
        moved = any(change.series.scenario == scenario and change.called in recent for change in of.throughput.changes)
        found.append(_Trend(scenario=scenario, moved=moved, arms=arms))
    return found


def _chart(one: Series, of: Summary) -> _Chart | None:
    first = of.nights[-_MOST_NIGHTS:][0]
    nights = [seen for seen in of.throughput.series[one] if seen.night >= first]
    if not nights:
        return None
    middle = sorted(seen.median for seen in nights)[len(nights) // 2]
    across = _Across(first=first, last=of.nights[-1])
    changes = [change for change in of.throughput.changes if change.series == one and change.since >= first]
    change = changes[-1] if changes else None
    last = nights[-1]
    says = f"{one.arm} on {one.host}: {last.median:,.0f} tok/s on {last.night:%Y-%m-%d} ({last.low:,.0f} to {last.high:,.0f})"
    return _Chart(
        says=says
        + (f"; {abs(change.ratio - 1):.1%} {change.direction} since {change.since:%Y-%m-%d}" if change else ""),
        now=f"{last.median:,.0f}",
        points=" ".join(f"{across.x(seen.night):g},{_y(seen.median, middle):g}" for seen in nights),
        whiskers=tuple((across.x(seen.night), _y(seen.high, middle), _y(seen.low, middle)) for seen in nights),
        band=_band(change, nights, across, middle) if change else None,
        changed=across.x(change.since) if change else None,
        tone="" if change is None else "good" if change.ratio > 1 else "bad",
    )


@dataclass(frozen=True, kw_only=True)
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
