"""The history on a terminal, as JSON, and as one HTML page that loads nothing from the network."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from vllm_repro.report.document import document, fragment, plain_text
from vllm_repro.report.format import columns, plural, terminal_width
from vllm_repro.report.text import Table
from vllm_repro_diagnosis.evidence import facts_of
from vllm_repro_nights.history import MARKS, History

_SIMULATED = "REHEARSAL: a simulated engine. These runs say nothing about vLLM."
_TEMPLATES = Path(__file__).parent / "templates"


def terminal(history: History) -> str:
    """Return the output of `vllm-repro history`."""
    return plain_text(
        "history.txt",
        _TEMPLATES,
        **_values(history),
        changes=change_lines(history),
        bugs=_bug_table(history),
        columns=partial(columns, most=terminal_width()),
    )


def _values(history: History) -> dict[str, Any]:
    """Return the values that the text and the page have in common."""
    return {
        "history": history,
        "headline": _headline(history),
        "banner": _SIMULATED if history.simulated else "",
        "folded": _folded(history),
        "throughput": _throughput_table(history),
    }


def _bug_table(history: History) -> Table:
    """Return the table of the bugs that a run decided, with a letter for each night."""
    rows = [
        (
            bug.state.verdict,
            bug.scenario,
            bug.evidence,
            "".join(MARKS[cell.result].letter for cell in bug.nights),
            bug.reason,
        )
        for bug in history.bugs
        if bug.decided
    ]
    nights = plural(len(history.nights), "night")
    return Table(("state", "scenario", "evidence", nights, "reason"), tuple(rows))


def _headline(history: History) -> str:
    """Return the line that counts the last night's runs: as expected, surprises, undecided."""
    runs = history.last_night
    if not runs:
        return "no run of these scenarios in the last night"
    surprises = sum(run.surprise for run in runs)
    undecided = sum(run.undecided for run in runs)
    as_expected = len(runs) - surprises - undecided
    return (
        f"last night {plural(len(runs), 'run')}: {as_expected} as expected, "
        f"{plural(surprises, 'surprise')}, {undecided} undecided"
    )


def change_lines(history: History) -> list[str]:
    """Return a line for each change, claims about vLLM first."""
    marks = [facts_of(change.evidence).mark for change in history.changes]
    return [
        f"{change.kind.upper() if change.call else change.kind}: {change.scenario}"
        f"{f' ({mark})' if mark else ''}: {change.text}"
        for change, mark in zip(history.changes, marks, strict=True)
    ]


def _folded(history: History) -> list[str]:
    """Return the names of the bugs that no run decided, which get no row, such as `ID (lab)`.

    The evidence is left out if no trial tested an engine.
    """
    return [
        f"{bug.scenario} ({bug.evidence})" if bug.tested else bug.scenario
        for bug in history.bugs
        if not bug.decided
    ]


def _throughput_table(history: History) -> Table:
    """Return the table of output tokens a second, in the last night and before."""
    rows = [
        (
            f"{figure.scenario}, {figure.arm}",
            figure.load,
            figure.host,
            figure.label,
            f"{figure.night}",
            f"{figure.last:,.0f}",
            "-" if figure.before is None else f"{figure.before:,.0f}",
        )
        for figure in history.throughput
    ]
    heads = ("arm", "load", "host", "measured on", "night", "output tok/s", "night before")
    return Table(heads, tuple(rows))


def as_json(history: History) -> dict[str, Any]:
    """Return the history as JSON data.

    Throughput is in output tokens a second. A run is its folder, relative to that of all reports.
    """
    fields: dict[str, Any] = msgspec.to_builtins(history)
    fields["last_night"] = [run.id for run in history.last_night]
    return {"schema": 3, "rehearsal": history.simulated, **fields}


def html_page(history: History, way: str, near: Mapping[str, str] | None = None) -> str:
    """Return the history as one HTML page.

    way: relative link from the page to the folder of all runs. near: links that replace those to
    some runs, by id.
    """
    replaced = near or {}
    body = fragment(
        "history.html",
        _TEMPLATES,
        **_values(history),
        link=lambda run: quote(replaced.get(run, f"{way}/{run}/")),
        marks=MARKS,
    )
    title = f"Nights to {history.nights[-1]}" if history.nights else "Nights"
    style = (_TEMPLATES / "history.css").read_text(encoding="utf-8")
    return document(title=title, body=body, style=style)
