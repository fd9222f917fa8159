"""Summary of the history as text, JSON and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import date, tzinfo
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_repro.report.format import columns, plural
from vllm_repro.report.json_report import ArmJson
from vllm_repro.report.runs import Run
from vllm_repro.report.text import Table
from vllm_repro.verdict.throughput import Point
from vllm_repro_diagnosis.evidence import facts_of
from vllm_repro_nights.bug_state import BugHistory
from vllm_repro_nights.nights import night_of
from vllm_repro_nights.setups import setup_of, signature_of
from vllm_repro_nights.summary import News, Summary
from vllm_repro_nights.throughput import Series

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "SIMULATED",
    "as_csv",
    "as_json",
    "evidence_word",
    "headline",
    "news_lines",
    "run_table",
    "speed_table",
    "state_text",
    "terminal",
]

SIMULATED = "REHEARSAL: a simulated engine. These runs say nothing about vLLM."

_FIGURES = ("output_tok_s", "tpot_s", "ttft_s")


def evidence_word(evidence: str) -> str:
    """Return the mark of evidence that is not from a GPU, or an empty string."""
    return facts_of(evidence).mark


def state_text(bug: BugHistory) -> str:
    """Return the counts behind a state: `died in 23 of 60 boots (flaky); 2 quiet since; 19 quiet boots in a row would be a fix`."""
    if not bug.boots:
        return "declared good, and the newest release lived" if bug.state.good else "the bug was not seen here"
    text = f"{bug.did} in {bug.crashed} of {bug.boots} boots" + (" (flaky)" if bug.flaky else "")
    if bug.state.good:
        return f"{text} until then; {bug.streak} quiet in a row made it a fix"
    quiet = f"{bug.streak} quiet since; " if bug.streak else ""
    return f"{text}; {quiet}{bug.needed} quiet boots in a row would be a fix"


def terminal(of: Summary) -> str:
    """Return the output of `vllm-repro history`."""
    if not of.nights:
        return headline(of)
    lines = [SIMULATED] if of.simulated else []
    lines += [headline(of), ""]
    if of.since is None:
        lines.append("There is no earlier night to compare with.")
    else:
        lines.append(f"since the night of {of.since}:")
        lines += [f"  {line}" for line in news_lines(of)] or ["  nothing changed"]
    rows: list[tuple[str, ...]] = [
        ("scenario", "evidence", "state", "since", f"last {plural(len(of.shown), 'night')}", "rests on")
    ]
    for bug in of.bugs:
        letters = "".join(cell.mark for cell in of.rows.get((bug.scenario, bug.evidence), ()))
        evidence = evidence_word(bug.evidence) or bug.evidence
        rows.append((bug.scenario, evidence, bug.state, f"{bug.since}", letters, state_text(bug)))
    lines += ["", *columns(rows, (32, 9, 17, 10, 60, 80))]
    if speeds := speed_table(of):
        lines += ["", *columns([speeds.heads, *speeds.rows], (48, 36, *[48] * len(of.hosts)))]
    return "\n".join(lines)


def headline(of: Summary) -> str:
    """Return one line: `840 runs, 70 nights …; last night 12 runs: 11 as expected, 0 surprises, 1 undecided`."""
    if not of.nights:
        return "no run is in the history yet"
    surprises = sum(row.surprise for row in of.tonight)
    undecided = sum(row.undecided for row in of.tonight)
    return (
        f"{plural(of.runs, 'run')}, {plural(len(of.nights), 'night')} from {of.nights[0]} to {of.nights[-1]}, "
        f"{plural(len(of.hosts), 'host')}; last night {plural(len(of.tonight), 'run')}: "
        f"{len(of.tonight) - surprises - undecided} as expected, {plural(surprises, 'surprise')}, {undecided} undecided"
    )


def news_lines(of: Summary) -> list[str]:
    """Return a line for each item of news, the most important first."""
    return [_news_line(news) for news in of.news]


def _news_line(news: News) -> str:
    word = evidence_word(news.evidence)
    return f"{news.kind.upper() if news.kind.call else news.kind}: {news.scenario}{f' ({word})' if word else ''}: {news.text}"


def speed_table(of: Summary) -> Table | None:
    """Return the newest median, the range and the newest change of the nights shown: a row per arm and load, a column per host."""
    found: dict[tuple[str, str, Point], dict[str, str]] = {}
    for one in of.throughput:
        found.setdefault((one.scenario, one.arm, one.point), {})[one.host] = _speed(one, of)
    rows = [
        (f"{scenario}, {arm}", str(point), *(cells.get(host, "-") for host in of.hosts))
        for (scenario, arm, point), cells in found.items()
    ]
    return Table(("output tok/s, and the range of those nights", "load", *of.hosts), tuple(rows)) if rows else None


def _speed(one: Series, of: Summary) -> str:
    medians = [speed for night, speed in one.nights.items() if night in of.shown]
    if not medians:
        return "-"
    text = f"{medians[-1]:,.0f} ({min(medians):,.0f} to {max(medians):,.0f})"
    changes = [change for change in one.changes if change.called in of.shown]
    return text + (f", {changes[-1].words}" if changes else "")


def as_json(of: Summary) -> dict[str, Any]:
    """Return JSON data. Ratios are new over old, speeds are output tokens a second, runs are folders below the reports."""
    plain: dict[str, Any] = msgspec.to_builtins(
        {
            "schema": 2,
            "rehearsal": of.simulated,
            "nights": of.nights,
            "since": of.since,
            "runs": of.runs,
            "hosts": of.hosts,
            "news": [{**asdict(news), "call": news.kind.call} for news in of.news],
            "scenarios": [
                {**asdict(bug), "flaky": bug.flaky, "nights": of.rows.get((bug.scenario, bug.evidence), ())}
                for bug in of.bugs
            ],
            "throughput": of.throughput,
        },
        str_keys=True,
    )
    return plain


def run_table(rows: Sequence[Run], zone: tzinfo | None) -> pd.DataFrame:
    """Return one row per run and arm. An arm's figures are medians of its boots at its first load, in seconds and tokens a second."""
    import pandas as pd  # here: importing pandas takes half a second, and most commands do not need it

    lines = [_line(row, arm, night_of(row.started_at, zone)) for row in rows for arm in row.arms]
    return pd.DataFrame(lines, columns=list(_COLUMNS)).astype(dict.fromkeys(_FIGURES, float))


def as_csv(rows: Sequence[Run], zone: tzinfo | None) -> str:
    """Return the table of runs as CSV, without the figures that no run has."""
    table = run_table(rows, zone)
    return str(table.drop(columns=[name for name in _FIGURES if table[name].isna().all()]).to_csv(index=False))


_COLUMNS = (
    *("night", "id", "scenario", "started_at", "host", "hardware", "evidence", "server", "version", "verdict"),
    *("expected", "name", "result", "crashed", "boots", "signature", "setup", *_FIGURES),
)


def _line(row: Run, arm: ArmJson, night: date) -> dict[str, object]:
    boots = [trial.throughput for trial in arm.trials if trial.throughput]
    known = {name: [speed for one in boots if (speed := getattr(one, name)) is not None] for name in _FIGURES}
    return {
        **{name: getattr(row, name) for name in ("id", "scenario", "started_at", "host", "hardware", "evidence")},
        "night": night,
        "server": next((one.server.kind for one in row.arms if one.server.kind), ""),
        "version": row.vllm_version,
        "verdict": row.verdict,
        "expected": None if row.undecided else row.expected,
        "name": arm.name,
        "result": arm.result,
        "crashed": arm.k,
        "boots": arm.n,
        "signature": signature_of(arm),
        "setup": setup_of(arm),
        **{name: median(speeds) for name, speeds in known.items() if speeds},
    }
