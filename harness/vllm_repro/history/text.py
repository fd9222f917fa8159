"""Summary of the history as text, JSON and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, tzinfo
from typing import Any

from vllm_repro.evidence import facts_of
from vllm_repro.history.bug_state import BugHistory, BugState
from vllm_repro.history.nights import night_of
from vllm_repro.history.rows import RunRow
from vllm_repro.history.summary import News, Summary
from vllm_repro.history.throughput import QUANTITY, Change, Series, newest
from vllm_repro.report.wording import columns, plural

__all__ = ["SIMULATED", "as_csv", "as_json", "evidence_word", "headline", "state_text", "terminal"]

SIMULATED = "REHEARSAL: a simulated engine. These runs say nothing about vLLM."


_RUN_COLUMNS = (
    "id",
    "scenario",
    "started_at",
    "host",
    "hardware",
    "evidence",
    "server",
    "version",
    "verdict",
    "expected",
)
_ARM_COLUMNS = ("name", "result", "crashed", "boots", "signature", "setup")


def evidence_word(evidence: str) -> str:
    """Return the mark of evidence that is not from a GPU, or an empty string."""
    return facts_of(evidence).mark


def state_text(bug: BugHistory) -> str:
    """Return the counts behind a state: `23 of 60 died (flaky); 2 quiet since; 19 quiet boots in a row would be a fix`."""
    if not bug.boots:
        return "declared good, never seen to die here" if bug.state is BugState.CLOSED else "no death seen here"
    text = f"{bug.crashed} of {bug.boots} {bug.did}" + (" (flaky)" if bug.flaky else "")
    if bug.state.good:
        return f"{text} until then; {bug.streak} quiet in a row made it a fix"
    quiet = f"{bug.streak} quiet since; " if bug.streak else ""
    return f"{text}; {quiet}{bug.needed} quiet boots in a row would be a fix"


def terminal(of: Summary) -> str:
    """Return the output of `vllm-repro history`."""
    if not of.nights:
        return "no run is in the history yet"
    lines = [headline(of)]
    if of.simulated:
        lines.insert(0, SIMULATED)
    if of.since is None:
        lines += ["", "There is no earlier night to compare with."]
    else:
        lines += ["", f"since the night of {of.since:%Y-%m-%d}:"]
        lines += [f"  {_news_line(news)}" for news in of.news] or ["  nothing changed"]
    nights = ["".join(cell.mark for cell in of.rows.get((bug.scenario, bug.evidence), ())) for bug in of.bugs]
    rows = [("scenario", "evidence", "state", "since", f"last {plural(len(of.shown), 'night')}", "rests on")]
    for bug, letters in zip(of.bugs, nights, strict=True):
        rows.append(
            (
                bug.scenario,
                bug.evidence.upper() if bug.evidence != "gpu" else "gpu",
                bug.state,
                f"{bug.since:%Y-%m-%d}",
                letters,
                state_text(bug),
            )
        )
    lines += ["", *columns(rows, (32, 9, 17, 10, 60, 80))]
    lines += _speeds(of)
    return "\n".join(lines)


def headline(of: Summary) -> str:
    """Return one line: `840 runs, 70 nights …; last night 12 runs: 11 as expected, 0 surprises, 1 undecided`."""
    surprises = sum(row.expected is False for row in of.tonight)
    undecided = sum(row.expected is None for row in of.tonight)
    return (
        f"{plural(of.runs, 'run')}, {plural(len(of.nights), 'night')} from {of.nights[0]:%Y-%m-%d} to {of.nights[-1]:%Y-%m-%d}, "
        f"{plural(len(of.hosts), 'host')}; last night {plural(len(of.tonight), 'run')}: "
        f"{len(of.tonight) - surprises - undecided} as expected, {plural(surprises, 'surprise')}, {undecided} undecided"
    )


def _news_line(news: News) -> str:
    word = evidence_word(news.evidence)
    return f"{news.kind.upper() if news.kind.call else news.kind}: {news.scenario}{f' ({word})' if word else ''}: {news.text}"


def _speeds(of: Summary) -> list[str]:
    """Return a table: a row per arm and load, a column per host, each with the newest median and the range of the nights shown."""
    series = newest(of.throughput)
    loads = dict.fromkeys((one.scenario, one.arm, one.point) for one in series)
    if not loads:
        return []
    rows: list[tuple[str, ...]] = [("output tok/s, and the range of those nights", "load", *of.hosts)]
    for scenario, arm, point in loads:
        cells = {
            one.host: _speed(one, of) for one in series if (one.scenario, one.arm, one.point) == (scenario, arm, point)
        }
        rows.append((f"{scenario}, {arm}", str(point), *(cells.get(host, "-") for host in of.hosts)))
    return ["", *columns(rows, (48, 36, *[24] * len(of.hosts)))]


def _speed(one: Series, of: Summary) -> str:
    medians = [seen.median for seen in of.throughput.series[one] if seen.night in of.shown]
    return f"{medians[-1]:,.0f} ({min(medians):,.0f} to {max(medians):,.0f})" if medians else "-"


def as_json(of: Summary) -> dict[str, Any]:
    """Return JSON data. Ratios are new over old, speeds are output tokens a second, runs are folders below the reports."""
    return {
        "schema": 1,
        "rehearsal": of.simulated,
        "nights": [_day(night) for night in of.nights],
        "since": of.since and _day(of.since),
        "runs": of.runs,
        "hosts": of.hosts,
        "news": [
            {
                "kind": news.kind.value,
                "call": news.kind.call,
                "night": _day(news.night),
                "scenario": news.scenario,
                "evidence": news.evidence,
                "text": news.text,
                "run": news.run or None,
            }
            for news in of.news
        ],
        "scenarios": [
            {
                "scenario": bug.scenario,
                "evidence": bug.evidence,
                "life": bug.state.value,
                "since": _day(bug.since),
                "k": bug.crashed,
                "n": bug.boots,
                "quiet": bug.streak,
                "needed": bug.needed,
                "flaky": bug.flaky,
                "steps": [
                    {"night": _day(step.night), "was": step.was, "life": step.state, "why": step.why, "run": step.run}
                    for step in bug.steps
                ],
                "nights": [
                    {"night": _day(cell.night), "mark": cell.mark, "surprise": cell.surprise, "runs": list(cell.runs)}
                    for cell in of.rows.get((bug.scenario, bug.evidence), ())
                ],
            }
            for bug in of.bugs
        ],
        "throughput": [_series(one, of) for one in newest(of.throughput)],
    }


def _day(night: date) -> str:
    return f"{night:%Y-%m-%d}"


def _named(one: Series) -> dict[str, Any]:
    return {
        "scenario": one.scenario,
        "arm": one.arm,
        "prompt": one.point.prompt,
        "output": one.point.output,
        "concurrency": one.point.concurrency,
        "host": one.host,
    }


def _change(one: Change) -> dict[str, Any]:
    return {
        **_named(one.series),
        "direction": one.direction.value,
        "since": _day(one.since),
        "ratio": one.ratio,
        "reference": {"median": one.reference, "low": one.low, "high": one.high, "nights": one.nights},
    }


def _series(one: Series, of: Summary) -> dict[str, Any]:
    return {
        **_named(one),
        "quantity": QUANTITY,
        "nights": [
            {"night": _day(seen.night), "median": seen.median, "low": seen.low, "high": seen.high, "n": seen.n}
            for seen in of.throughput.series[one]
        ],
        "changes": [_change(change) for change in of.throughput.changes if change.series == one],
    }


def as_csv(rows: Sequence[RunRow], zone: tzinfo | None) -> str:
    """Return CSV with one line per run and arm. An arm's figures are columns such as `output_tok_s`, for its first load."""
    import pandas as pd  # here: importing pandas takes half a second, and most commands do not need it

    lines = [
        {
            "night": _day(night_of(row.started_at, zone)),
            **{name: getattr(row, name) for name in _RUN_COLUMNS},
            **{name: getattr(arm, name) for name in _ARM_COLUMNS},
            **{one.quantity: one.median for one in reversed(arm.figures or ())},
        }
        for row in rows
        for arm in row.arms
    ]
    columns = ["night", *_RUN_COLUMNS, *_ARM_COLUMNS]
    extra = sorted({name for line in lines for name in line} - set(columns))
    return str(pd.DataFrame(lines, columns=[*columns, *extra]).to_csv(index=False))
