"""The report of a run as an HTML page in one file: what `report.md` has, and timelines and logs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from vllm_repro.journal.log_excerpts import ALARM, LogExcerpts
from vllm_repro.report.chart import Chart, timeline_chart
from vllm_repro.report.document import asset, document, fragment
from vllm_repro.report.format import seconds
from vllm_repro.report.json_report import VersionMapJson
from vllm_repro.report.markdown import environment_lines, senders
from vllm_repro.report.model import ArmReport, RunReport, TrialReport, banner, issue_url
from vllm_repro.report.source_changes import changed_files, diff_of, untried_note
from vllm_repro.report.tables import arms_table, soak_lines, throughput_notes, throughput_table
from vllm_repro.report.text import Table, printable
from vllm_repro.report.timeline import Timeline
from vllm_repro.report.wording import (
    boundary,
    crash_summary,
    engine_word,
    expected_words,
    first_of_each,
    headline,
    outcome_word,
    refusals,
    simulated,
)
from vllm_repro.verdict.outcome import Outcome

__all__ = ["MissingLog", "html_page", "log_names", "read_version_map"]

_MOST_LISTED = 100


@dataclass(frozen=True)
class MissingLog:
    """A log that is not on the page. why: as the end of a sentence."""

    name: str
    why: str


@dataclass(frozen=True, kw_only=True)
class _TrialView:
    """A trial as the page shows it. report: None if a cut journal has no outcome for it."""

    arm: str
    number: int
    report: TrialReport | None
    timeline: Timeline | None
    chart: Chart | None
    word: str
    tone: str


@dataclass(frozen=True, kw_only=True)
class _LogView:
    """A log as the page shows it: pieces of text, each with a CSS class or none. An `error` or `root` is marked once at most."""

    name: str
    size: int
    pieces: tuple[tuple[str, str], ...]


def html_page(
    report: RunReport, logs: Sequence[LogExcerpts | MissingLog] = (), versions: tuple[str, VersionMapJson] | None = None
) -> str:
    """Return the page. logs: those of `log_names`, in that order. versions: where a version map lies, and the map."""
    roots = log_names(report)
    body = fragment(
        "report.html",
        report=report,
        **_first_screen(report),
        **_sections(report),
        versions=_version_table(*versions) if versions else None,
        logs=[_log_view(log, roots.get(log.name)) for log in logs if isinstance(log, LogExcerpts)],
        missing_logs=[log for log in logs if isinstance(log, MissingLog)],
    )
    title = f"{report.scenario}: {report.verdict.verdict}{simulated(report.evidence)}"
    return document(title=title, body=body, style=asset("report.css"))


# ── the first screen ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _first_screen(report: RunReport) -> dict[str, Any]:
    notices = []
    if changed := changed_files(report):
        notices.append(f"With vLLM's source changed, as shown below, in {'; '.join(changed)}.")
    if report.shortfall:
        notices.append(f"{report.shortfall}. This is what was seen until then.")
    tones = {outcome.value: outcome.facts.tone for outcome in Outcome}
    heads, rows = arms_table(report)
    return {
        "issue_url": issue_url(report.issue),
        "banner": banner(report.evidence, report.version),
        "mark": simulated(report.evidence).strip(" ()"),
        "notices": notices,
        "verdict_tone": report.verdict.verdict.tone,
        "expected": expected_words(report.verdict.expected),
        "expected_tone": "warn" if report.verdict.expected is False else "dull",
        "headline": headline(report),
        "notes": (*report.comparisons, *refusals(report.arms)),
        "cause": next((_cause(arm, trial) for arm, trial in report.failures), None),
        "heads": heads,
        "rows": [(row, tones.get(re.split("[, ]", row[-2])[0], "dull")) for row in rows],
    }


def _cause(arm: ArmReport, trial: TrialReport) -> dict[str, Any]:
    """Return what the template shows of the most important failure. An engine that did not die has no exception."""
    death = trial.death
    frames = death.frames if death else ()
    return {
        "arm": arm.name,
        "exception": death and death.exception,
        "message": (death and death.message) or "",
        "why": trial.why,
        "where": frames[-1] if frames else "",
        "summary": crash_summary(trial) or outcome_word(trial),
        "frames": frames[-15:],
        "outer": max(len(frames) - 15, 0),
        "matched": death and death.signature,
    }


# ── below it ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _sections(report: RunReport) -> dict[str, Any]:
    found = report.measured
    measured = found is not None and bool(found.baseline)
    return {
        "trials": [*_trials(report), *_unfinished(report)],
        "more_trials": [f"{arm.name}: {text}" for arm in report.arms for text in first_of_each(arm.trials)[1]],
        "boundary": boundary,
        "engine_word": engine_word,
        "seconds": seconds,
        "throughput": found if measured else None,
        "throughput_table": throughput_table(found, rehearsal=report.rehearsal) if measured else None,
        "throughput_notes": throughput_notes(found, rehearsal=report.rehearsal) if found and measured else [],
        "soaks": soak_lines(found),
        "senders": [(names, requests[:_MOST_LISTED], len(requests)) for requests, names in senders(report).items()],
        "commands": [arm for arm in report.arms if arm.command],
        "patches": [(arm, diff_of(arm)) for arm in report.arms if arm.patches],
        "untried_note": untried_note,
        "environment": environment_lines(report),
    }


def _trials(report: RunReport) -> Iterator[_TrialView]:
    for arm in report.arms:
        for trial in first_of_each(arm.trials)[0]:
            timeline = report.timelines.get((arm.name, trial.number))
            yield _TrialView(
                arm=arm.name,
                number=trial.number,
                report=trial,
                timeline=timeline,
                chart=timeline_chart(timeline) if timeline else None,
                word=outcome_word(trial),
                tone=trial.outcome.facts.tone,
            )


def _unfinished(report: RunReport) -> Iterator[_TrialView]:
    """Yield the trials that a cut journal does not end."""
    ended = {(arm.name, trial.number) for arm in report.arms for trial in arm.trials}
    for (arm, number), timeline in report.timelines.items():
        if not timeline.ended and (arm, number) not in ended:
            yield _TrialView(
                arm=arm,
                number=number,
                report=None,
                timeline=timeline,
                chart=timeline_chart(timeline),
                word="not concluded",
                tone="warn",
            )


# ── logs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def log_names(report: RunReport) -> dict[str, str | None]:
    """Return the logs of the shown trials, those of deaths first, each with the exception that the engine died of."""
    shown = [trial for arm in report.arms for trial in first_of_each(arm.trials)[0]]
    found: dict[str, str | None] = {}
    for trial in sorted(shown, key=lambda trial: trial.death is None):
        for name in (trial.log, *trial.rank_logs):
            found.setdefault(name, trial.death.exception if trial.death else None)
    return found


def _log_view(log: LogExcerpts, root: str | None) -> _LogView:
    """Return the log with its first error and the line of the root exception marked."""
    pieces: list[tuple[str, str]] = []
    patterns = {"error": ALARM}
    if root:
        patterns["root"] = re.compile(r"(?<![\w'])" + re.escape(root) + r"(?=:|\s*$)")
    for piece in log.excerpts:
        if piece.before:
            pieces.append(("gap", f"[… {piece.before:,} bytes left out: {log.name} has them …]"))
        plain: list[str] = []
        for line in printable(piece.text).removesuffix("\n").split("\n"):
            # One line is often both, and then it is the root.
            kinds = [kind for kind, pattern in patterns.items() if pattern.search(line)]
            if not kinds:
                plain.append(line)
                continue
            if plain:
                pieces.append(("", "\n".join(plain)))
            pieces.append((kinds[-1], line))
            plain = []
            for kind in kinds:
                del patterns[kind]
        if plain:
            pieces.append(("", "\n".join(plain)))
    return _LogView(name=log.name, size=log.size, pieces=tuple(pieces))


# ── the version map beside the run ────────────────────────────────────────────────────────────────────────────────────────


def read_version_map(loaded: object, scenario: str) -> VersionMapJson | None:
    """Return the content of a `versions.json`, or None if it is no map of this scenario."""
    try:
        found = msgspec.convert(loaded, VersionMapJson)
    except msgspec.ValidationError:
        return None
    return found if found.scenario == scenario else None


def _version_table(where: str, versions: VersionMapJson) -> dict[str, Any]:
    arms = [(row, arm) for row in versions.rows for arm in row.arms]
    did = " or ".join(dict.fromkeys(arm.expected.did for _, arm in arms)) or "died"
    rows = [
        (
            row.version,
            arm.declared.value,
            arm.name,
            arm.fate.value,
            f"{arm.k} of {arm.n}" if arm.n else "-",
            row.run or "-",
        )
        for row, arm in arms
    ]
    rows += [(version, "-", "-", "not tried", "-", "-") for version in versions.pending]
    return {
        "mark": simulated(versions.evidence or ""),
        "reading": versions.reading,
        "started_at": versions.started_at,
        "where": where,
        "table": Table(("release", "declared", "arm", "it", did, "run"), tuple(rows)),
    }
