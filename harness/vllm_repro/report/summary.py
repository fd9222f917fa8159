"""What the terminal prints at the end of a run."""

from __future__ import annotations

import io
import os
import shlex
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_repro.report.format import seconds
from vllm_repro.report.model import RunReport
from vllm_repro.report.patches import patches_lines
from vllm_repro.report.source_changes import untried_note
from vllm_repro.report.tables import throughput_lines
from vllm_repro.report.text import printable, shorten
from vllm_repro.report.wording import (
    boundary,
    client_line,
    death_line,
    engine_word,
    grouped,
    not_run_word,
    outcome_word,
    outlasted_line,
    refusals,
)

__all__ = ["print_summary", "summary"]

_LONGEST_CAUSE = 4_000
_COLUMNS = {"arm": 24, "boot": 8, "boundary": 60, "engine": 28, "outcome": 32}
"""Headings of the table of trials, and the most letters of each column."""


def print_summary(report: RunReport, stream: TextIO) -> None:
    """Print the summary, its table as wide as the terminal if `stream` is one."""
    print("\n" + summary(report, os.get_terminal_size(stream.fileno()).columns if stream.isatty() else 0), file=stream)


def summary(report: RunReport, width: int = 0) -> str:
    """Return the end of a run: the table of trials, the cause, the verdict and the next step. width: of the terminal, 0 for none."""
    table = Table(box=None, pad_edge=False)
    for heading, widest in _COLUMNS.items():
        table.add_column(heading, max_width=widest, no_wrap=not width)
    for row in _rows(report):
        table.add_row(*(Text(printable(cell), overflow="ellipsis" if not width else "fold") for cell in row))
    drawn = io.StringIO()
    Console(file=drawn, width=width or 2 * sum(_COLUMNS.values())).print(table)
    lines = [line.rstrip() for line in drawn.getvalue().splitlines()]
    return printable("\n".join([_heading(report), "", *lines, *_conclusion(report)]))


def _heading(report: RunReport) -> str:
    version = f"{'REHEARSAL of ' if report.rehearsal else ''}vLLM {report.vllm_version or '?'}"
    return f"{report.scenario}   {report.issue}   {version}   declared: {report.status}"


def _rows(report: RunReport) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for arm in report.arms:
        for trial, times in grouped(arm.trials):
            outcome = outcome_word(trial) + times
            rows.append((arm.name, seconds(trial.boot_s), boundary(trial), engine_word(trial), outcome))
        if not arm.trials:
            rows.append((arm.name, "", "", "", not_run_word(arm)))
    return rows


def _conclusion(report: RunReport) -> list[str]:
    lines = patches_lines(report)
    for arm in report.arms:
        lines += [f"changed in {arm.name}: {file.file}{untried_note(file)}" for file in arm.server.patched]
    lines += refusals(report.arms)
    notable = [trial for _, trial in report.failures] or [
        trial for arm in report.arms for trial in arm.trials if trial.outcome not in ("clean", "untriggered")
    ]
    if notable:
        lines += ["", shorten(notable[0].why, _LONGEST_CAUSE)]
        lines += [f"  {make(notable[0])}" for make in (death_line, client_line, outlasted_line) if make(notable[0])]
    expected = {True: "as expected", False: "a SURPRISE", None: "undecided"}[report.as_expected]
    folder = shlex.quote(str(report.folder))
    script = "   script: repro.py" if (report.folder / "repro.py").is_file() else ""
    lines += throughput_lines(report.measured)
    lines += [
        "",
        f"verdict: {report.verdict}{' (REHEARSAL)' if report.rehearsal else ''}, {expected}",
        f"         {report.because}",
        *(f"         {text}" for text in report.comparisons),
        f"report:  {report.folder / 'report.md'}   page: report.html{script}",
        *(f"draft:   vllm-repro draft {folder}" for _ in range(not report.rehearsal)),
        f"again:   {report.reproduce}",
    ]
    if report.shortfall and not report.interrupted:
        lines.append(f"{report.shortfall}; this is what it holds")
    if report.interrupted:
        lines += [
            f"interrupted by {report.interrupted}; nothing is left running",
            f"resume:  vllm-repro run --resume {folder}",
        ]
    return lines
