"""What a night was for a scenario, in one letter. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from enum import StrEnum

from vllm_repro.history.rows import RunRow
from vllm_repro.verdict.verdict import Verdict

__all__ = ["MARKS", "Cell", "Mark", "cells"]


class Mark(StrEnum):
    """What a night was for a scenario, as one letter."""

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
    Mark.INFRA: "trouble of the host",
    Mark.CUT: "interrupted or cut",
    Mark.NOT_RUN: "not run",
}
_OF = {
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
"""What a night of several runs is shown as: the first of these."""


@dataclass(frozen=True)
class Cell:
    """A scenario in one night. surprise: whether a run contradicts what is declared. runs: their folders, the telling one first."""

    night: date
    mark: Mark
    surprise: bool
    mixed: bool
    runs: tuple[str, ...]


def cells(rows: Sequence[tuple[date, RunRow]], nights: Sequence[date]) -> dict[tuple[str, str], tuple[Cell, ...]]:
    """By scenario and kind of evidence, a cell for each of `nights`; those that ran in none of them are left out."""
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
        return Cell(night, Mark.NOT_RUN, False, False, ())
    marked = sorted(((_mark(row), row) for row in rows), key=lambda pair: (_WORST.index(pair[0]), pair[1].started_at))
    marks = {mark for mark, _ in marked}
    surprise = any(row.expected is False for row in rows)
    return Cell(night, marked[0][0], surprise, len(marks) > 1, tuple(row.id for _, row in marked))


def _mark(row: RunRow) -> Mark:
    """Of one run. What a run of controls or of patched arms alone found says nothing of the bug in vLLM as it was built."""
    mark = _OF[row.verdict]
    told = {Mark.QUIET: bool(row.quiet), Mark.FIXED: bool(row.quiet), Mark.CHANGED: bool(row.leading)}
    if mark is not None and told.get(mark, row.died is not None):
        return mark
    if row.interrupted or row.cut:
        return Mark.CUT
    return Mark.INFRA if row.infra else Mark.UNDECIDED
