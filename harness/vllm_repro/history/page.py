"""The nightly page: a `Summary` as one HTML file that loads nothing from the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from vllm_repro.history.bug_state import BugState
from vllm_repro.history.nights import Cell, Mark
from vllm_repro.history.summary import NewsKind, Summary
from vllm_repro.history.text import SIMULATED, evidence_word, headline, speed_cell, speeds_by_load, state_text
from vllm_repro.history.throughput import Series
from vllm_repro.report.document import asset, document, fragment

__all__ = ["page"]

_NEWS_TONES = {
    NewsKind.REGRESSED: "bad",
    NewsKind.SLOWER: "bad",
    NewsKind.OTHER_FAILURE: "bad",
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
_WIDE, _HIGH = 160, 28
_MOST_NIGHTS = 70


@dataclass(frozen=True, kw_only=True)
class _Speed:
    """The throughput of one arm at one load on one host. points: of its line, one per night. change: the newest one in these nights."""

    text: str
    points: str
    change: str
    tone: str


def page(of: Summary, way: str, notice: str = "", near: Mapping[str, str] | None = None) -> str:
    """Return the page.

    way: link from it to the folder of all runs. notice: banner. near: links that replace those to some runs, by run.
    """
    replaced = near or {}

    def link(run: str) -> str:
        return quote(replaced.get(run, f"{way}/{run}/")) if run else ""

    body = fragment(
        "history.html",
        of=of,
        summary=headline(of),
        banner=notice or (SIMULATED if of.simulated else ""),
        link=link,
        cell_words=_cell_words,
        evidence_word=evidence_word,
        state_text=state_text,
        news_tones=_NEWS_TONES,
        state_tones=_STATE_TONES,
        marks=list(Mark),
        speeds=_speeds(of),
        most=_MOST_NIGHTS,
        wide=_WIDE,
        high=_HIGH,
    )
    title = f"Nights to {of.nights[-1]:%Y-%m-%d}" if of.nights else "Nights"
    return document(title=title, body=body, style=asset("history.css"))


def _cell_words(cell: Cell) -> str:
    words = f"{cell.night:%Y-%m-%d}: {cell.mark.meaning}"
    if cell.mixed:
        words += ", and another run of that night something else"
    return words + ("; not as declared" if cell.surprise else "")


def _speeds(of: Summary) -> dict[str, list[tuple[str, list[_Speed | None]]]]:
    """Return, by scenario, a row for each arm and load with a cell for each host."""
    found: dict[str, list[tuple[str, list[_Speed | None]]]] = {}
    for (scenario, arm, point), hosts in speeds_by_load(of).items():
        cells = [_speed(hosts[host], of) if host in hosts else None for host in of.hosts]
        found.setdefault(scenario, []).append((f"{arm}, {point}", cells))
    return found


def _speed(one: Series, of: Summary) -> _Speed:
    first = of.nights[-_MOST_NIGHTS:][0]
    nights = [seen for seen in one.nights if seen.night >= first]
    most = max((seen.median for seen in nights), default=1.0)
    days = max((of.nights[-1] - first).days, 1)
    places = ((_WIDE * (seen.night - first).days / days, _HIGH * (1 - seen.median / most)) for seen in nights)
    changes = [change for change in one.changes if change.called >= first]
    words: dict[str, Any] = {"change": "", "tone": ""}
    for change in changes[-1:]:
        words["change"] = f"{abs(change.ratio - 1):.1%} {change.direction} since {change.since:%Y-%m-%d}"
        words["tone"] = "good" if change.ratio > 1 else "bad"
    return _Speed(text=speed_cell(one, of), points=" ".join(f"{x:.1f},{y:.1f}" for x, y in places), **words)
