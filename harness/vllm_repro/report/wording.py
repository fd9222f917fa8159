"""Short phrases that several formats share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from vllm_repro.evidence import facts_of
from vllm_repro.report.format import plural, seconds
from vllm_repro.report.model import ArmReport, RunReport, TrialReport, counted_trials
from vllm_repro.report.source_changes import changed_files
from vllm_repro.report.text import shorten
from vllm_repro.verdict.outcome import Outcome

__all__ = [
    "INTERRUPTED",
    "NOT_RUN",
    "boundary",
    "client_line",
    "context",
    "crash_summary",
    "crossed_word",
    "death_line",
    "engine_word",
    "expected_words",
    "first_of_each",
    "grouped",
    "not_run_word",
    "notices",
    "outcome_word",
    "outlasted_line",
    "rank_logs",
    "refusals",
    "refused_words",
    "simulated",
]

INTERRUPTED, NOT_RUN = "interrupted", "not run"

_FIRST = 3
"""Trials of one outcome that a report describes; the others are counted."""
_LONGEST_MESSAGE = 200
"""Bytes of what a client saw. `report.json` has all of it."""


# ── sentences about a run ─────────────────────────────────────────────────────────────────────────────────────────────────


def notices(report: RunReport) -> list[str]:
    """Return what a reader must know before the verdict, as sentences without their stop: changed sources, an incomplete journal."""
    found = []
    if changed := changed_files(report):
        found.append(f"With vLLM's source changed, as shown below, in {'; '.join(changed)}")
    if report.shortfall:
        found.append(f"{report.shortfall}. This is what the journal holds")
    return found


def context(report: RunReport) -> list[str]:
    """Return the sentences beside the verdict, without their stops: the fix, the lab's own exception, comparisons, refused requests."""
    fixed = re.fullmatch(r">=([\d.]+)", report.fixed_in)
    found = [f"Declared fixed since {fixed[1]}"] if fixed else []
    deaths = (trial.death for _, trial in report.failures if trial.death and trial.death.frames)
    if any(death.frames[-1].startswith("vllm_repro_lab/") for death in deaths):
        found.append(
            "The lab's rule about captured graphs raised this exception, in torch's words; on a GPU, C++ code raises it"
        )
    return [*found, *report.comparisons, *refusals(report.arms)]


def crash_summary(trial: TrialReport) -> str:
    """Return the sentences on how the death was detected, what a client saw, and which servers of other nodes outlasted it."""
    return " ".join(filter(None, (death_line(trial), client_line(trial), outlasted_line(trial))))


def death_line(trial: TrialReport) -> str:
    """Return `Detected by log after 9 ms, then by health. Phase: request.` and why it is only near the bug; nothing without a death."""
    death = trial.death
    if death is None:
        return ""
    others = [channel for channel in death.channels if channel != death.detected_by]
    then = f", then by {', '.join(others)}" if others else ""
    during = f", after the workload, in {trial.during}" if trial.during else ""
    where = f" {_ranks(trial)}." if death.ranks else ""
    near = f" Near this bug's signature, but {death.differs}." if death.differs else ""
    return f"Detected by {death.detected_by} {_latency(death.latency_s)}{then}. Phase: {trial.phase or 'unknown'}{during}.{where}{near}"


def client_line(trial: TrialReport) -> str:
    """Return `A program with the openai SDK then saw APIConnectionError "…" after 1.3 s (retries: 2).`, or nothing."""
    saw = trial.client_saw
    if saw is None or saw.error is None:
        return ""
    message = shorten(" ".join(saw.message.split()), _LONGEST_MESSAGE)
    after = f"after {saw.seconds:.1f} s (retries: {saw.retries})"
    return f'A program with the openai SDK then saw {saw.error} "{message}" {after}.'


def outlasted_line(trial: TrialReport) -> str:
    """Return a sentence for each server of a further node that kept running after the first node's was gone."""
    lines = []
    for one in trial.outlasted:
        silent = " and logged nothing" if one.silent else ""
        lines.append(
            f"The server of rank {one.rank} kept running for {one.watched_s:g} s after that of rank 0 was gone{silent}; "
            f"stopping it took {seconds(one.ended_s)}."
        )
    return " ".join(lines)


def _ranks(trial: TrialReport) -> str:
    ranks = trial.death.ranks if trial.death else ()
    return (
        f"Began on rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}: {', '.join(rank_logs(trial))}"
    )


def rank_logs(trial: TrialReport) -> list[str]:
    """Return the logs of the ranks on which a death began; empty for a server on one node."""
    ranks = trial.death.ranks if trial.death else ()
    return [trial.log.removesuffix(".log") + f".rank{rank}.log" if rank else trial.log for rank in ranks]


def _latency(value_s: float | None) -> str:
    if value_s is None:
        return "at an unknown time"
    return f"after {value_s * 1000:.0f} ms" if value_s < 1 else f"after {value_s:.1f} s"


def refused_words(statuses: Sequence[int], sent: int) -> str:
    """Return `1 of 2 requests was refused (400)`."""
    words = ", ".join(f"{one} x {times}" if times > 1 else f"{one}" for one, times in Counter(statuses).items())
    return f"{len(statuses)} of {plural(sent, 'request')} {'was' if len(statuses) == 1 else 'were'} refused ({words})"


def refusals(arms: Sequence[ArmReport]) -> list[str]:
    """Return `eager: 1 of 2 requests was refused (400)` for each arm whose server refused requests."""
    found = []
    for arm in arms:
        trials = [trial for trial in arm.trials if trial.refused]
        if trials:
            statuses = [status for trial in trials for status in trial.refused]
            found.append(f"{arm.name}: {refused_words(statuses, sum(trial.requests['sent'] for trial in trials))}")
    return found


# ── which trials are shown ────────────────────────────────────────────────────────────────────────────────────────────────


def grouped(trials: Sequence[TrialReport]) -> list[tuple[TrialReport, str]]:
    """Return a row for each trial, or for each outcome if there are four trials or more, with a suffix such as ` x 5`."""
    counted = {trial.number for trial in counted_trials(trials)}
    rows = [(trial, "") for trial in trials]
    if len(trials) >= 4:
        first = {trial.outcome: trial for trial in reversed(trials)}
        rows = [(trial, f" x {sum(t.outcome is outcome for t in trials)}") for outcome, trial in first.items()]
    return [(trial, times if trial.number in counted else f"{times}, repeated") for trial, times in rows]


def first_of_each(trials: Sequence[TrialReport]) -> tuple[list[TrialReport], list[str]]:
    """Return the first trials of each outcome of one arm, and a sentence about the others of each outcome."""
    shown: list[TrialReport] = []
    seen: Counter[Outcome] = Counter()
    crossed: Counter[Outcome] = Counter()
    for trial in trials:
        seen[trial.outcome] += 1
        if seen[trial.outcome] <= _FIRST:
            shown.append(trial)
        else:
            crossed[trial.outcome] += trial.trigger.crossed
    more = [(outcome, times - _FIRST) for outcome, times in seen.items() if times > _FIRST]
    return shown, [f"{n:,} more: {outcome}, the boundary crossed in {crossed[outcome]:,}" for outcome, n in more]


# ── words ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def not_run_word(arm: ArmReport) -> str:
    """Return the word for an arm without a finished trial; empty for others. One that has a command was begun."""
    return "" if arm.trials else INTERRUPTED if arm.command else NOT_RUN


def outcome_word(trial: TrialReport) -> str:
    """Return `crash, match`."""
    return trial.outcome + (f", {trial.death.signature}" if trial.death and trial.death.signature else "")


def expected_words(expected: bool | None) -> str:
    return {True: "as expected", False: "a surprise", None: "undecided"}[expected]


def simulated(evidence: str) -> str:
    """Return the mark beside everything that did not happen on vLLM itself: ` (LAB)`."""
    facts = facts_of(evidence)
    return f" ({facts.mark})" if facts.simulated else ""


def crossed_word(trial: TrialReport) -> str:
    """Return `crossed`, `not crossed`, or `not tested` for a trial that did not test the engine."""
    if trial.trigger.crossed:
        return "crossed"
    return "not crossed" if trial.outcome.facts.tested else "not tested"


def boundary(trial: TrialReport) -> str:
    """Return the result of the trigger, short enough for a table."""
    word = crossed_word(trial)
    return f"{word}: {trial.trigger.brief}" if trial.trigger.brief else word


def engine_word(trial: TrialReport) -> str:
    """Return the state of the engine: `died (detected after 20 ms)`, `alive`."""
    if trial.death is not None:
        return f"died (detected {_latency(trial.death.latency_s)})"
    return trial.outcome.facts.engine
