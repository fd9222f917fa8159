"""Nights: which night a run belongs to, and one letter for what a scenario did in it.

A night is named for its morning and begins at 18:00 the evening before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, tzinfo
from enum import StrEnum

from vllm_repro.history.rows import RunRow
from vllm_repro.verdict.verdict import Verdict

__all__ = ["MARKS", "Cell", "Mark", "cells", "night_of"]

_EVENING = timedelta(hours=6)


def night_of(started_at: str, zone: tzinfo | None) -> date:
    """Return the night of `2026-11-22T03:45:16Z` in `zone` (None: local time). Raises `ValueError` for other texts."""
    return (datetime.fromisoformat(started_at).astimezone(zone).replace(tzinfo=None) + _EVENING).date()


class Mark(StrEnum):
    """Result of a scenario in one night, as one letter."""

    REPRODUCES = "R"
    REGRESSED = "X"
    CHANGED = "C"
    QUIET = "Q"
    FIXED = "F"
    UNDECIDED = "?"
    INFRA = "I"
    CUT = "/"
    NOT_RUN = "·"


MARKS = {
    Mark.REPRODUCES: "reproduces",
    Mark.REGRESSED: "regressed",
    Mark.CHANGED: "died of something else",
    Mark.QUIET: "quiet: trigger crossed, engine alive",
    Mark.FIXED: "fixed, as that night's run says",
    Mark.UNDECIDED: "undecided",
    Mark.INFRA: "infra trouble",
    Mark.CUT: "interrupted or cut",
    Mark.NOT_RUN: "not run",
}
_BY_VERDICT = {
    Verdict.REPRODUCES: Mark.REPRODUCES,
    Verdict.REGRESSED: Mark.REGRESSED,
    Verdict.CHANGED: Mark.CHANGED,
    Verdict.QUIET: Mark.QUIET,
    Verdict.FIXED: Mark.FIXED,
    Verdict.INCONCLUSIVE: None,
}
_WORST = (
    Mark.REGRESSED,
    Mark.CHANGED,
    Mark.REPRODUCES,
    Mark.QUIET,
    Mark.FIXED,
    Mark.INFRA,
    Mark.CUT,
    Mark.UNDECIDED,
)
"""A night of several runs shows the first of these."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A scenario in one night.

    surprise: a run contradicts the declared status. mixed: its runs differ. runs: their folders, the shown one first.
    """

    night: date
    mark: Mark
    surprise: bool
    mixed: bool
    runs: tuple[str, ...]


def cells(rows: Sequence[tuple[date, RunRow]], nights: Sequence[date]) -> dict[tuple[str, str], tuple[Cell, ...]]:
    """Return a cell for each of `nights`, by scenario and evidence. Those without a run are left out."""
    of: dict[tuple[str, str], dict[date, list[RunRow]]] = {}
    for night, row in rows:
        of.setdefault((row.scenario, row.evidence), {}).setdefault(night, []).append(row)
    return {
        key: tuple(_cell(night, those.get(night, ())) for night in nights)
        for key, those in sorted(of.items())
        if any(night in those for night in nights)
    }


def _cell(night: date, rows: Sequence[RunRow]) -> Cell:
    if not rows:
        return Cell(night=night, mark=Mark.NOT_RUN, surprise=False, mixed=False, runs=())
    marked = sorted(((_mark(row), row) for row in rows), key=lambda pair: (_WORST.index(pair[0]), pair[1].started_at))
    marks = {mark for mark, _ in marked}
    surprise = any(row.expected is False for row in rows)
    return Cell(
        night=night,
        mark=marked[0][0],
        surprise=surprise,
        mixed=len(marks) > 1,
        runs=tuple(row.id for _, row in marked),
    )


def _mark(row: RunRow) -> Mark:
    """Return the mark of one run. A run of only controls or patched arms does not decide about the bug."""
    mark = _BY_VERDICT[row.verdict]
    decides = {Mark.QUIET: bool(row.quiet), Mark.FIXED: bool(row.quiet), Mark.CHANGED: bool(row.leading)}
    if mark is not None and decides.get(mark, row.died is not None):
        return mark
    if row.interrupted or row.cut:
        return Mark.CUT
    return Mark.INFRA if row.infra else Mark.UNDECIDED
