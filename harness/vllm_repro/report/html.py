"""The report of a run as an HTML page in one file.

It has what `report.md` has, and the events of each trial and logs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import Any

from vllm_repro.journal.log_excerpts import ALARM, LogExcerpts
from vllm_repro.report.document import TEMPLATES, document, fragment
from vllm_repro.report.format import seconds
from vllm_repro.report.markdown import environment_lines, senders
from vllm_repro.report.model import ArmReport, RunReport, TrialReport, issue_url
from vllm_repro.report.patches import patches_table
from vllm_repro.report.source_changes import diff_of, frame_link, how_to_apply, untried_note
from vllm_repro.report.tables import (
    arms_table,
    counters_table,
    throughput_lead,
    throughput_notes,
    throughput_table,
)
from vllm_repro.report.text import printable
from vllm_repro.report.timeline import Event
from vllm_repro.report.wording import (
    boundary,
    crash_summary,
    crossed_word,
    details,
    engine_word,
    expected_words,
    first_of_each,
    notices,
    outcome_word,
    plain_sentence,
)
from vllm_repro.trigger.trigger import Amounts
from vllm_repro.verdict.outcome import Death, Outcome
from vllm_repro_diagnosis.evidence import simulation_mark

_MOST_LISTED = 100


@dataclass(frozen=True)
class MissingLog:
    """A log of a trial that is not shown on the page."""

    name: str
    # it lies in the run's folder, and the page has no room for it
    exists: bool

    @property
    def why(self) -> str:
        """Return why the page does not show the log."""
        return "no room on this page" if self.exists else "not beside this page when it was made"


def html_page(report: RunReport, logs: Sequence[LogExcerpts | MissingLog] = ()) -> str:
    """Return the HTML report of a run. logs: those of `log_names`, in that order."""
    roots = log_names(report)
    heads, rows = arms_table(report)
    tones = {outcome.value: outcome.facts.tone for outcome in Outcome}
    measured = report.measured
    body = fragment(
        "report.html",
        report=report,
        issue_url=issue_url(report.issue),
        mark=simulation_mark(report.evidence),
        notices=notices(report),
        expected=expected_words(report.as_expected),
        expected_tone="warn" if report.as_expected is False else "dull",
        sentence=plain_sentence(report),
        details=details(report),
        cause=next((_cause(report, arm, trial) for arm, trial in report.failures), None),
        amounts=_amounts(report),
        heads=heads,
        patches_table=patches_table(report),
        rows=[(row, tones.get(re.split("[, ]", row[1])[0], "dull")) for row in rows],
        trials=list(_trials(report)),
        more_trials=[
            f"{arm.name}: {text}" for arm in report.arms for text in first_of_each(arm.trials)[1]
        ],
        outcome_word=outcome_word,
        crossed_word=crossed_word,
        boundary=boundary,
        engine_word=engine_word,
        seconds=seconds,
        throughput=measured,
        throughput_table=throughput_table(measured),
        counters_table=counters_table(measured),
        throughput_lead=throughput_lead(report),
        throughput_notes=throughput_notes(measured) if measured else (),
        senders=[
            (names, requests[:_MOST_LISTED], len(requests))
            for requests, names in senders(report).items()
        ],
        commands=[arm for arm in report.arms if arm.command],
        patches=[(arm, how_to_apply(arm), diff_of(arm)) for arm in report.arms if arm.patches],
        replaced=[
            (part.name, part.why, part.effect, part.file, part.sha256) for part in report.replaced
        ],
        untried_note=untried_note,
        environment=environment_lines(report),
        logs=[
            (log, _marked(log, roots.get(log.name))) for log in logs if isinstance(log, LogExcerpts)
        ],
        linked={log.name for log in logs if isinstance(log, LogExcerpts) or log.exists},
        missing_logs=[log for log in logs if isinstance(log, MissingLog)],
    )
    title = f"{report.scenario}: {report.verdict}{simulation_mark(report.evidence)}"
    return document(
        title=title, body=body, style=(TEMPLATES / "report.css").read_text(encoding="utf-8")
    )


def _cause(report: RunReport, arm: ArmReport, trial: TrialReport) -> dict[str, Any]:
    """Return the template's values for a failed trial, such as `exception`, `why`, `frames`.

    If the engine did not die, `exception` is None and `frames` is empty.
    """
    death = trial.death
    frames = list(_frames(report, arm, death)) if death else []
    return {
        "arm": arm.name,
        "exception": death and death.exception,
        "message": (death and death.message) or "",
        "why": trial.why,
        "where": frames[-1] if frames else None,
        "summary": crash_summary(trial) or outcome_word(trial),
        "frames": frames[-15:],
        "outer": max(len(frames) - 15, 0),
        "matched": death and death.signature,
    }


def _frames(report: RunReport, arm: ArmReport, death: Death) -> Iterator[tuple[str, str, str]]:
    """Yield (place, function, URL) of each frame of a death's traceback; place is `FILE:LINE`.

    The URL is empty unless the file is an unchanged one of a release.
    """
    for frame, line in zip_longest(death.frames, death.lines[: len(death.frames)], fillvalue=0):
        file, _, function = str(frame).rpartition(":")
        yield f"{file}:{line}" if line else file, function, frame_link(report, arm, file, int(line))


def _amounts(report: RunReport) -> list[tuple[Amounts, str, float]]:
    """Return (amounts, arm name, greatest of these amounts) for each bar chart of one trial.

    The trial is the most important failure with amounts of the trigger, else the first trial with
    some. Empty if none has any.
    """
    trials = [*report.failures, *((arm, trial) for arm in report.arms for trial in arm.trials)]
    for arm, trial in trials:
        if amounts := trial.trigger.amounts:
            return [(each, arm.name, max(1e-9, *dict(each.bars).values())) for each in amounts]
    return []


def _trials(report: RunReport) -> Iterator[tuple[str, int, TrialReport | None, Sequence[Event]]]:
    """Yield (arm, number, report, events) of each trial to show.

    The report is None if the journal ends before the trial does.
    """
    ended = {(arm.name, trial.number): trial for arm in report.arms for trial in arm.trials}
    shown = [
        (arm.name, trial.number) for arm in report.arms for trial in first_of_each(arm.trials)[0]
    ]
    for trial in (*shown, *(trial for trial in report.timelines if trial not in ended)):
        yield *trial, ended.get(trial), report.timelines.get(trial, ())


# ── logs
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def log_names(report: RunReport) -> dict[str, str | None]:
    """Return {log name: exception that the engine died of} of the trials to show, deaths first.

    The exception is None if the engine did not die, or if it is unknown.
    """
    shown = [trial for arm in report.arms for trial in first_of_each(arm.trials)[0]]
    exceptions: dict[str, str | None] = {}
    for trial in sorted(shown, key=lambda trial: trial.death is None):
        for name in (trial.log, *trial.rank_logs):
            exceptions.setdefault(name, trial.death.exception if trial.death else None)
    return exceptions


def _marked(log: LogExcerpts, root: str | None) -> list[tuple[str, str]]:
    """Return a log as pieces (CSS class, text), of class `error`, `root`, `gap` or "".

    The line of the first error is an `error`, that of the root exception a `root`, and a `gap` says
    how many bytes are left out. root: name of the root exception, None if unknown.
    """
    pieces: list[tuple[str, str]] = []
    patterns = {"error": ALARM}
    if root:
        patterns["root"] = re.compile(r"(?<![\w'])" + re.escape(root) + r"(?=:|\s*$)")
    for piece in log.excerpts:
        if piece.before:
            pieces.append(("gap", f"[… {piece.before:,} bytes left out: {log.name} has them …]"))
        lines: list[tuple[str, str]] = []
        for line in printable(piece.text).removesuffix("\n").split("\n"):
            # One line is often both, and then it is the root.
            kinds = [kind for kind, pattern in patterns.items() if pattern.search(line)]
            lines.append((kinds[-1] if kinds else "", line))
            for kind in kinds:
                del patterns[kind]
        pieces += [
            (kind, "\n".join(line for _, line in run))
            for kind, run in groupby(lines, key=itemgetter(0))
        ]
    return pieces
