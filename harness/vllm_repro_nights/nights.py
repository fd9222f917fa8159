"""Nights: which night a run belongs to, and one letter for what a scenario did in it.

A night is named for its morning and begins at 18:00 the evening before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, tzinfo
from enum import StrEnum

from vllm_repro.report.runs import Run
from vllm_repro.verdict.outcome import Tone
from vllm_repro.verdict.verdict import Verdict

__all__ = ["Cell", "Mark", "cells", "night_of"]

_EVENING = timedelta(hours=6)


def night_of(started_at: str, zone: tzinfo | None) -> date:
    """Return the night of `2026-11-22T03:45:16Z` in `zone` (None: local time). Raises `ValueError` for other texts."""
    return (datetime.fromisoformat(started_at).astimezone(zone).replace(tzinfo=None) + _EVENING).date()


class Mark(StrEnum):
    """Result of a scenario in one night, as one letter. A night of several runs shows the first of these."""

    REGRESSED = "X"
    CHANGED = "C"
    REPRODUCES = "R"
    QUIET = "Q"
    FIXED = "F"
    INFRA = "I"
    INTERRUPTED = "/"
    UNDECIDED = "?"
    NOT_RUN = "·"

    @property
    def meaning(self) -> str:
        return _MARKS[self][0]

    @property
    def tone(self) -> Tone:
        return _MARKS[self][1]


_MARKS: dict[Mark, tuple[str, Tone]] = {
    Mark.REGRESSED: ("regressed", "bad"),
    Mark.CHANGED: ("failed in another way", "bad"),
    Mark.REPRODUCES: ("reproduces", "warn"),
    Mark.QUIET: ("quiet: trigger crossed, engine alive", "good"),
    Mark.FIXED: ("fixed, by the verdict of that night's run", "good"),
    Mark.INFRA: ("infra trouble", "dull"),
    Mark.INTERRUPTED: ("interrupted", "dull"),
    Mark.UNDECIDED: ("undecided", "dull"),
    Mark.NOT_RUN: ("not run", "dull"),
}
_BY_VERDICT = {
    Verdict.REPRODUCES: Mark.REPRODUCES,
    Verdict.REGRESSED: Mark.REGRESSED,
    Verdict.CHANGED: Mark.CHANGED,
    Verdict.QUIET: Mark.QUIET,
    Verdict.FIXED: Mark.FIXED,
    Verdict.INCONCLUSIVE: Mark.UNDECIDED,
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A scenario in one night.

    surprise: a run contradicts the declared status. mixed: its runs differ. runs: their folders, the shown one first.
    """

    night: date
    mark: Mark = Mark.NOT_RUN
    surprise: bool = False
    mixed: bool = False
    runs: tuple[str, ...] = ()


def cells(rows: Sequence[tuple[date, Run]], nights: Sequence[date]) -> dict[tuple[str, str], tuple[Cell, ...]]:
    """Return a cell for each of `nights`, by scenario and evidence. Those without a run are left out."""
    of: dict[tuple[str, str], dict[date, list[Run]]] = {}
    for night, row in rows:
        of.setdefault((row.scenario, row.evidence), {}).setdefault(night, []).append(row)
    return {
        key: tuple(_cell(night, those.get(night, ())) for night in nights)
        for key, those in sorted(of.items())
        if any(night in those for night in nights)
    }


def _cell(night: date, rows: Sequence[Run]) -> Cell:
    if not rows:
        return Cell(night=night)
    order = list(Mark)
    marked = sorted(((_mark(row), row) for row in rows), key=lambda pair: (order.index(pair[0]), pair[1].started_at))
    return Cell(
        night=night,
        mark=marked[0][0],
        surprise=any(row.surprise for row in rows),
        mixed=len({mark for mark, _ in marked}) > 1,
        runs=tuple(row.id for _, row in marked),
    )


def _mark(row: Run) -> Mark:
    """Return the mark of one run. A run of only controls or patched arms does not decide about the bug."""
    mark = _BY_VERDICT[row.verdict]
    decides = {
        Mark.QUIET: row.quiet > 0,
        Mark.FIXED: row.quiet > 0,
        Mark.CHANGED: bool(row.leading),
        Mark.UNDECIDED: False,
    }
    if decides.get(mark, row.died is not None):
        return mark
    if row.interrupted or row.journal_cut:
        return Mark.INTERRUPTED
    return Mark.INFRA if row.infra else Mark.UNDECIDED
