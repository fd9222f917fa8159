"""Text for the terminal at the end of a run."""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_repro.report.document import plain_text
from vllm_repro.report.format import seconds
from vllm_repro.report.model import RunReport
from vllm_repro.report.patches import patches_lines
from vllm_repro.report.source_changes import untried_note
from vllm_repro.report.tables import throughput_lines
from vllm_repro.report.text import printable
from vllm_repro.report.wording import (
    boundary,
    crash_sentences,
    engine_word,
    grouped,
    not_run_word,
    outcome_word,
    refusals,
)
from vllm_repro.verdict.outcome import Outcome

_COLUMNS = {"arm": 24, "boot": 8, "boundary": 60, "engine": 28, "outcome": 32}
"""Headings of the table of trials, and the most letters of each column."""


def print_summary(report: RunReport, stream: TextIO) -> None:
    """Print the summary to `stream`, its table as wide as the terminal if `stream` is one."""
    width = os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0
    print("\n" + summary(report, width), file=stream)


def summary(report: RunReport, width: int = 0) -> str:
    """Return the text for the end of a run: table of trials, cause, verdict and next step.

    width: of the terminal in letters, 0 for none.
    """
    trials = [trial for arm in report.arms for trial in arm.trials]
    notable = [trial for _, trial in report.failures] or [
        trial for trial in trials if trial.outcome not in (Outcome.CLEAN, Outcome.UNTRIGGERED)
    ]
    return plain_text(
        "summary.txt",
        report=report,
        trials=_trials(report, width),
        patches=patches_lines(report),
        untried_note=untried_note,
        refusals=refusals(report.arms),
        notable=notable[0] if notable else None,
        crash_sentences=crash_sentences,
        throughput=throughput_lines(report),
        expected={True: "as expected", False: "a SURPRISE", None: "undecided"}[report.as_expected],
        script=(report.folder / "repro.py").is_file(),
        where=shlex.quote(str(report.folder)),
    )


def _trials(report: RunReport, width: int) -> str:
    """Return the table of trials as text. width: of the terminal in letters, 0 for none."""
    table = Table(box=None, pad_edge=False)
    for heading, widest in _COLUMNS.items():
        table.add_column(heading, max_width=widest, no_wrap=not width)
    for row in _rows(report):
        table.add_row(
            *(Text(printable(cell), overflow="fold" if width else "ellipsis") for cell in row)
        )
    drawn = io.StringIO()
    Console(file=drawn, width=width or 2 * sum(_COLUMNS.values())).print(table)
    return "\n".join(line.rstrip() for line in drawn.getvalue().splitlines())


def _rows(report: RunReport) -> Iterator[tuple[str, ...]]:
    """Yield the cells of the table's rows: arm, boot time, boundary, engine, outcome."""
    for arm in report.arms:
        for trial, times in grouped(arm.trials):
            outcome = outcome_word(trial) + times
            yield arm.name, seconds(trial.boot_s), boundary(trial), engine_word(trial), outcome
        if not arm.trials:
            yield arm.name, "", "", "", not_run_word(arm)
