"""The run as a page of HTML in one file: what `report.md` says, and the timelines, the charts and the logs. Pure.

It is bounded whatever the run holds: of very many trials those are shown that differ, of logs the parts that tell, and it says what is
left out and where that lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_repro.journal.log_excerpts import LogPieces
from vllm_repro.report.answered import Trial
from vllm_repro.report.chart import Chart, chunk_chart, interval_chart, timeline_chart
from vllm_repro.report.document import asset, document, fragment
from vllm_repro.report.logview import LogView, view
from vllm_repro.report.map_of_run import Mapped
from vllm_repro.report.markdown import environment_lines, senders
from vllm_repro.report.model import ArmReport, RunReport, TrialReport, banner
from vllm_repro.report.patched import changed_files, diff_of, untried_in
from vllm_repro.report.speed import ratio_words, shown_rows, soak_lines, speed_grid, speed_notes, spread_words
from vllm_repro.report.table import arms_grid
from vllm_repro.report.timeline import Asked, Timeline
from vllm_repro.report.wording import (
    boundary,
    death_line,
    engine_word,
    expected_words,
    outcome_word,
    outlasted_line,
    refusals,
    seconds,
    simulated,
)
from vllm_repro.verdict.outcome import Outcome

__all__ = ["LOG_ROOM", "UnreadLog", "html_page", "log_names", "shown_trials"]

LOG_ROOM = 2 << 20
"""Bytes of logs on a page, in all."""

_MOST_TRIALS, _MOST_LISTED, _MOST_ARMS = 60, 100, 40


@dataclass(frozen=True)
class UnreadLog:
    """A log that is not on the page. why: as the end of a sentence."""

    name: str
    why: str


@dataclass(frozen=True)
class _Shown:
    """A trial with what is drawn of it. conclusion: None where a cut journal has none."""

    key: str
    arm: str
    number: int
    conclusion: TrialReport | None
    timeline: Timeline | None
    chart: Chart | None
    outcome: str
    word: str
    tone: str


def html_page(report: RunReport, logs: Sequence[LogPieces | UnreadLog] = (), versions: Mapped | None = None) -> str:
    """The whole page. logs: what there is of `log_names`, in that order. versions: the newest map of the scenario, where there is one."""
    values = {**_first_screen(report), **_below(report), **_logs(report, logs)}
    title = f"{report.scenario}: {report.verdict.verdict}{simulated(report.evidence)}"
    return document(
        title=title,
        body=fragment("report.html", report=report, versions=versions, **values),
        script=asset("copy.js") + asset("report.js"),
        style=asset("report.css"),
    )


# ── what is chosen ────────────────────────────────────────────────────────────────────────────────────────────────────────


def shown_trials(report: RunReport) -> list[tuple[ArmReport, TrialReport]]:
    """Those that a page has room for: the first of each outcome of each arm, then the second of each, and so on; in their order."""
    groups: dict[tuple[str, Outcome], list[tuple[ArmReport, TrialReport]]] = {}
    for arm in report.arms:
        for trial in arm.trials:
            groups.setdefault((arm.name, trial.outcome), []).append((arm, trial))
    chosen: set[Trial] = set()
    for turn in range(_MOST_TRIALS):
        for those in groups.values():
            if turn < len(those) and len(chosen) < _MOST_TRIALS:
                chosen.add((those[turn][0].name, those[turn][1].number))
    every = ((arm, trial) for arm in report.arms for trial in arm.trials)
    return [(arm, trial) for arm, trial in every if (arm.name, trial.number) in chosen][:_MOST_TRIALS]


def log_names(report: RunReport) -> dict[str, str | None]:
    """Logs of the shown trials, those of deaths first; each with the exception that its engine died of."""
    shown = shown_trials(report)
    found: dict[str, str | None] = {}
    for _, trial in sorted(shown, key=lambda pair: pair[1].death is None):
        for name in (trial.log, *trial.rank_logs):
            found.setdefault(name, trial.death.exception if trial.death else None)
    return found


def _left_out(report: RunReport, shown: Sequence[tuple[ArmReport, TrialReport]]) -> list[str]:
    """`reported: 9,940 crash`"""
    every = Counter((arm.name, trial.outcome) for arm in report.arms for trial in arm.trials)
    every.subtract(Counter((arm.name, trial.outcome) for arm, trial in shown))
    return [f"{arm}: {count:,} {outcome}" for (arm, outcome), count in every.items() if count > 0][:_MOST_LISTED]


# ── the first screen ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _first_screen(report: RunReport) -> dict[str, Any]:
    notices = []
    if changed := changed_files(report):
        notices.append(f"With vLLM's source changed, as shown below, in {'; '.join(changed)}.")
    if report.shortfall:
        notices.append(f"{report.shortfall}. What follows is what was seen until then.")
    heads, rows = arms_grid(report)
    tones = {outcome.value: outcome.facts.tone for outcome in Outcome}
    return {
        "banner": banner(report.evidence, report.version),
        "mark": simulated(report.evidence).strip(" ()"),
        "notices": notices,
        "verdict_tone": report.verdict.verdict.tone,
        "expected": expected_words(report.verdict.expected),
        "expected_tone": {True: "dull", False: "warn", None: "dull"}[report.verdict.expected],
        "told_of_arms": (*report.comparisons, *refusals(report.arms)),
        "cause": next((_cause(arm, trial) for arm, trial in report.failures), None),
        "heads": heads,
        "rows": [(row, tones.get(row[-2].partition(",")[0].partition(" ")[0], "dull")) for row in rows],
    }


def _cause(arm: ArmReport, trial: TrialReport) -> dict[str, Any]:
    """exception, where, message, frames: empty for an engine that lives, and hangs or answers wrongly."""
    death = trial.death
    every = death.frames if death else ()
    frames = every[-15:]
    return {
        "arm": arm.name,
        "exception": death and death.exception,
        "message": (death and death.message) or "",
        "why": trial.why,
        "where": every[-1] if every else "",
        "seen": " ".join(filter(None, (death_line(trial), outlasted_line(trial)))) or outcome_word(trial),
        "frames": frames,
        "outer": len(every) - len(frames),
        "matched": death and death.signature,
    }


# ── below it ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _below(report: RunReport) -> dict[str, Any]:
    shown = shown_trials(report)
    trials = [*(_shown(report, arm, trial) for arm, trial in shown), *_unfinished(report)]
    return {
        "trials": trials,
        "left_out": _left_out(report, shown),
        "total": sum(len(arm.trials) for arm in report.arms),
        "outcomes": list(dict.fromkeys((one.outcome, one.tone) for one in trials)),
        "arm_names": list(dict.fromkeys(one.arm for one in trials)),
        "boundary": boundary,
        "engine_word": engine_word,
        "seconds": seconds,
        "chunks": _chunks(report),
        "speed": _speed(report),
        "soaks": soak_lines(report.measured),
        "senders": [(names, requests[:_MOST_LISTED], len(requests)) for requests, names in senders(report).items()],
        "commands": [arm for arm in report.arms if arm.command][:_MOST_ARMS],
        "patches": [(arm, diff_of(arm)) for arm in report.arms if arm.patches],
        "untried_in": untried_in,
        "replaced": next((arm.server["replaced"] for arm in report.arms if arm.server.get("replaced")), ()),
        "environment": environment_lines(report),
    }


def _shown(report: RunReport, arm: ArmReport, trial: TrialReport) -> _Shown:
    timeline = report.timelines.get((arm.name, trial.number))
    return _Shown(
        f"{arm.name} {trial.number}",
        arm.name,
        trial.number,
        trial,
        timeline,
        _chart(timeline),
        trial.outcome.value,
        outcome_word(trial),
        trial.outcome.facts.tone,
    )


def _unfinished(report: RunReport) -> Iterator[_Shown]:
    """Trials that a cut journal has the start of."""
    known = {(arm.name, trial.number) for arm in report.arms for trial in arm.trials}
    for (arm, number), timeline in report.timelines.items():
        if not timeline.ended and (arm, number) not in known:
            word = "not concluded"
            yield _Shown(f"{arm} {number}", arm, number, None, timeline, _chart(timeline), word, word, "warn")


def _chart(timeline: Timeline | None) -> Chart | None:
    chart = timeline_chart(timeline) if timeline is not None else None
    return chart if chart is not None and chart.rows else None


def _chunks(report: RunReport) -> list[tuple[list[str], int, Chart]]:
    """Once for all arms whose first trial had the same prompts and the same batch size."""
    alike: dict[tuple[tuple[Asked, ...], int], list[str]] = {}
    for arm in report.arms[:_MOST_ARMS]:
        found = next((report.timelines.get((arm.name, trial.number)) for trial in arm.trials), None)
        if found is not None and found.batch and found.asked:
            alike.setdefault((found.asked[:24], found.batch), []).append(arm.name)
    return [(names, batch, chunk_chart(asked, batch)) for (asked, batch), names in alike.items()]


def _speed(report: RunReport) -> Mapping[str, Any] | None:
    found = report.measured
    if found is None or not found.baseline:
        return None
    rows = shown_rows(found, rehearsal=report.rehearsal)
    mark = " (REHEARSAL)" if report.rehearsal else ""
    loads = list(dict.fromkeys(row.figures.point for row in rows))
    speeds = []
    for load in loads:
        here = [row for row in rows if row.figures.point == load]
        bars = [
            (row.arm + mark, (one := row.figures.output_tok_s).low, one.median, one.high, spread_words(one))
            for row in here
        ]
        held = [
            (row.arm + mark, row.ratio.low, row.ratio.ratio, row.ratio.high, ratio_words(row))
            for row in here
            if row.ratio
        ]
        speeds.append((str(load), interval_chart(bars), interval_chart(held, 1.0) if held else None))
    if rows:
        why = ""
    elif found.withheld:
        why = "What was measured is in journal.jsonl."
    else:
        why = "No arm was measured: an engine that died, or never lived, has no throughput."
    return {
        "withheld": found.withheld,
        "why": why,
        "mark": mark,
        "charts": speeds,
        "baseline": found.baseline,
        "grid": speed_grid(found, rehearsal=report.rehearsal) if rows else None,
        "notes": speed_notes(found, rehearsal=report.rehearsal, quote=str) if rows else [],
        "stopped": found.stopped,
    }


# ── the logs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _logs(report: RunReport, logs: Sequence[LogPieces | UnreadLog]) -> dict[str, Any]:
    roots = log_names(report)
    views: list[LogView] = [view(log, roots.get(log.name)) for log in logs if isinstance(log, LogPieces)]
    return {"logs": views, "unread": [log for log in logs if isinstance(log, UnreadLog)]}
