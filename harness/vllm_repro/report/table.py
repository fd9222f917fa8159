"""The table of arms that reporters make by hand: what each was answered, whether its engine lives, how fast it is, its signature. Pure.

A column stands only where the run can fill it: no check of answers without a scenario that asks for one, no speed that was not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm_repro.report.grid import Grid, table
from vllm_repro.report.model import ArmReport, RunReport, TrialReport
from vllm_repro.report.speed import ratio_words, shown_rows, spread_words
from vllm_repro.report.wording import boundary, engine_word, few, folded, outcome_word, seconds, unrun_word
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected

__all__ = ["arms_grid", "arms_table"]

_ANSWERS = 12


class _Line(NamedTuple):
    arm: ArmReport
    trial: TrialReport


Column = tuple[str, Callable[[_Line], str]]


def arms_table(report: RunReport) -> str:
    """Markdown of `arms_grid`."""
    return table(arms_grid(report))


def arms_grid(report: RunReport) -> Grid:
    """A row a trial, or, from four trials of an arm on, one an outcome. Its last two columns: outcome and result."""
    columns = _columns(report)
    # What the bug does, which arms that live did not.
    did = next((arm.expected.did for arm in report.arms if arm.expected.has_bug), Expected.DIES.did)
    rows: list[tuple[str, ...]] = []
    for arm in report.arms:
        for trial, times in folded(arm.trials):
            words = (words(_Line(arm, trial)) for _, words in columns)
            rows.append((arm.name, *words, f"{outcome_word(trial)}{times}", _result(arm, did)))
        if not arm.trials:
            rows.append((arm.name, *("" for _ in columns), unrun_word(arm), ""))
    return Grid(("arm", *(head for head, _ in columns), "outcome", "result"), tuple(rows))


def _columns(report: RunReport) -> list[Column]:
    columns: list[Column] = [
        ("boot", lambda line: seconds(line.trial.boot_s)),
        ("boundary", lambda line: boundary(line.trial)),
        ("answers", lambda line: ", ".join(few(line.trial.answers, _ANSWERS)) or "-"),
        ("engine", lambda line: engine_word(line.trial)),
    ]
    if any(trial.output for arm in report.arms for trial in arm.trials):
        columns.append(("output", lambda line: line.trial.output or "-"))
    if rows := shown_rows(report.measured, rehearsal=report.rehearsal):
        assert report.measured is not None  # it has the rows
        mark = " (REHEARSAL)" if report.rehearsal else ""
        first = {row.arm: row for row in rows if row.figures.point == rows[0].figures.point}
        speed = {arm: spread_words(row.figures.output_tok_s) + mark for arm, row in first.items()}
        ratios = {arm: ratio_words(row) + mark for arm, row in first.items() if row.ratio is not None}
        columns.append((f"output tok/s at {rows[0].figures.point}", lambda line: speed.get(line.arm.name, "-")))
        columns.append((f"to {report.measured.baseline}", lambda line: ratios.get(line.arm.name, "-")))
    return columns


def _result(arm: ArmReport, did: str) -> str:
    if arm.expected is Expected.UNTRIGGERED and set(arm.result.outcomes) == {Outcome.UNTRIGGERED}:
        return f"{arm.result.result}, as declared: it proves nothing"
    counted = f" ({arm.result.crashed} of {arm.result.conclusive} {did})" if arm.result.conclusive else ""
    return f"{arm.result.result}{counted}"
