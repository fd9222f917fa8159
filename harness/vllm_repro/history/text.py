"""Summary of the history as text, JSON and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import tzinfo
from typing import Any

import msgspec

from vllm_repro.evidence import facts_of
from vllm_repro.history.bug_state import BugHistory, BugState
from vllm_repro.history.nights import night_of
from vllm_repro.history.rows import QUANTITIES, RunRow
from vllm_repro.history.summary import News, Summary
from vllm_repro.history.throughput import QUANTITY, Series
from vllm_repro.report.format import columns, plural
from vllm_repro.verdict.throughput import Point

__all__ = [
    "SIMULATED",
    "as_csv",
    "as_json",
    "evidence_word",
    "headline",
    "speed_cell",
    "speeds_by_load",
    "state_text",
    "terminal",
]

SIMULATED = "REHEARSAL: a simulated engine. These runs say nothing about vLLM."

_RUN_COLUMNS = (
    *("id", "scenario", "started_at", "host", "hardware", "evidence", "server", "version", "verdict", "expected"),
)
_ARM_COLUMNS = ("name", "result", "crashed", "boots", "signature", "setup")


def evidence_word(evidence: str) -> str:
    """Return the mark of evidence that is not from a GPU, or an empty string."""
    return facts_of(evidence).mark


def state_text(bug: BugHistory) -> str:
    """Return the counts behind a state: `died in 23 of 60 boots (flaky); 2 quiet since; 19 quiet boots in a row would be a fix`."""
    if not bug.boots:
        return ("declared good, and " if bug.state is BugState.CLOSED else "") + "the bug was not seen here"
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
        lines += [f"  {_news_line(news)}" for news in of.news] or ["  nothing changed"]
    rows: list[tuple[str, ...]] = [
        ("scenario", "evidence", "state", "since", f"last {plural(len(of.shown), 'night')}", "rests on")
    ]
    for bug in of.bugs:
        letters = "".join(cell.mark for cell in of.rows.get((bug.scenario, bug.evidence), ()))
        evidence = evidence_word(bug.evidence) or bug.evidence
        rows.append((bug.scenario, evidence, bug.state, f"{bug.since}", letters, state_text(bug)))
    lines += ["", *columns(rows, (32, 9, 17, 10, 60, 80))]
    if loads := speeds_by_load(of):
        rows = [("output tok/s, and the range of those nights", "load", *of.hosts)]
        for (scenario, arm, point), hosts in loads.items():
            cells = (speed_cell(hosts[host], of) if host in hosts else "-" for host in of.hosts)
            rows.append((f"{scenario}, {arm}", str(point), *cells))
        lines += ["", *columns(rows, (48, 36, *[24] * len(of.hosts)))]
    return "\n".join(lines)


def headline(of: Summary) -> str:
    """Return one line: `840 runs, 70 nights …; last night 12 runs: 11 as expected, 0 surprises, 1 undecided`."""
    if not of.nights:
        return "no run is in the history yet"
    surprises = sum(row.expected is False for row in of.tonight)
    undecided = sum(row.expected is None for row in of.tonight)
    return (
        f"{plural(of.runs, 'run')}, {plural(len(of.nights), 'night')} from {of.nights[0]} to {of.nights[-1]}, "
        f"{plural(len(of.hosts), 'host')}; last night {plural(len(of.tonight), 'run')}: "
        f"{len(of.tonight) - surprises - undecided} as expected, {plural(surprises, 'surprise')}, {undecided} undecided"
    )


def _news_line(news: News) -> str:
    word = evidence_word(news.evidence)
    return f"{news.kind.upper() if news.kind.call else news.kind}: {news.scenario}{f' ({word})' if word else ''}: {news.text}"


def speeds_by_load(of: Summary) -> dict[tuple[str, str, Point], dict[str, Series]]:
    """Return the series to show, by scenario, arm and load, then by host."""
    found: dict[tuple[str, str, Point], dict[str, Series]] = {}
    for one in of.throughput:
        found.setdefault((one.scenario, one.arm, one.point), {})[one.host] = one
    return found


def speed_cell(one: Series, of: Summary) -> str:
    """Return the newest median of the nights shown, and the range of their medians, in tokens a second."""
    medians = [seen.median for seen in one.nights if seen.night in of.shown]
    return f"{medians[-1]:,.0f} ({min(medians):,.0f} to {max(medians):,.0f})" if medians else "-"


def as_json(of: Summary) -> dict[str, Any]:
    """Return JSON data. Ratios are new over old, speeds are output tokens a second, runs are folders below the reports."""
    return {
        "schema": 1,
        "rehearsal": of.simulated,
        "nights": list(map(str, of.nights)),
        "since": of.since and str(of.since),
        "runs": of.runs,
        "hosts": of.hosts,
        "news": [{**msgspec.to_builtins(news), "call": news.kind.call, "run": news.run or None} for news in of.news],
        "scenarios": [_bug(bug, of) for bug in of.bugs],
        "throughput": [_series(one) for one in of.throughput],
    }


def _bug(bug: BugHistory, of: Summary) -> dict[str, Any]:
    return {
        "scenario": bug.scenario,
        "evidence": bug.evidence,
        "life": bug.state.value,
        "since": str(bug.since),
        "k": bug.crashed,
        "n": bug.boots,
        "quiet": bug.streak,
        "needed": bug.needed,
        "flaky": bug.flaky,
        "steps": [
            {"night": str(step.night), "was": step.was, "life": step.state, "why": step.why, "run": step.run}
            for step in bug.steps
        ],
        "nights": [
            {"night": str(cell.night), "mark": cell.mark, "surprise": cell.surprise, "runs": list(cell.runs)}
            for cell in of.rows.get((bug.scenario, bug.evidence), ())
        ],
    }


def _series(one: Series) -> dict[str, Any]:
    named = {"scenario": one.scenario, "arm": one.arm, **asdict(one.point), "host": one.host}
    changes = [
        {
            **named,
            "direction": change.direction.value,
            "since": str(change.since),
            "ratio": change.ratio,
            "reference": {
                "median": change.reference,
                "low": change.low,
                "high": change.high,
                "nights": change.nights,
            },
        }
        for change in one.changes
    ]
    return {**named, "quantity": QUANTITY, "nights": msgspec.to_builtins(one.nights), "changes": changes}


def as_csv(rows: Sequence[RunRow], zone: tzinfo | None) -> str:
    """Return CSV with one line per run and arm. An arm's figures are columns such as `output_tok_s`, for its first load."""
    import pandas as pd  # here: importing pandas takes half a second, and most commands do not need it

    lines = [
        {
            "night": night_of(row.started_at, zone),
            **{name: getattr(row, name) for name in _RUN_COLUMNS},
            **{name: getattr(arm, name) for name in _ARM_COLUMNS},
            **{one.quantity: one.median for one in reversed(arm.figures)},
        }
        for row in rows
        for arm in row.arms
    ]
    measured = [name for name in sorted(QUANTITIES) if any(name in line for line in lines)]
    return str(pd.DataFrame(lines, columns=["night", *_RUN_COLUMNS, *_ARM_COLUMNS, *measured]).to_csv(index=False))
