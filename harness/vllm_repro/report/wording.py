"""Short phrases that terminal and Markdown share. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vllm_repro.evidence import facts_of
from vllm_repro.report.model import ArmReport, TrialReport, counting
from vllm_repro.verdict.outcome import Outcome

__all__ = [
    "CUT",
    "NOT_RUN",
    "boundary",
    "columns",
    "cut",
    "death_line",
    "engine_word",
    "expected_words",
    "few",
    "folded",
    "latency",
    "many",
    "outcome_word",
    "outlasted_line",
    "rank_logs",
    "refusals",
    "refused_words",
    "seconds",
    "simulated",
    "telling",
    "unrun_word",
]

CUT, NOT_RUN = "cut short", "not run"

_FIRST = 3
"""Trials of one outcome that a report tells of one by one; the others are counted."""


def folded(trials: Sequence[TrialReport]) -> list[tuple[TrialReport, str]]:
    """One row a trial, or, from four trials on, one row an outcome with its count; and whether a boot that was cut was made again."""
    counted = {trial.number for trial in counting(trials)}
    rows = [(trial, "") for trial in trials]
    if len(trials) >= 4:
        first = {trial.outcome: trial for trial in reversed(trials)}
        rows = [(trial, f" x {sum(t.outcome is outcome for t in trials)}") for outcome, trial in first.items()]
    return [(trial, times if trial.number in counted else f"{times}, made again") for trial, times in rows]


def telling(trials: Sequence[TrialReport]) -> tuple[list[TrialReport], list[str]]:
    """Of one arm: the first trials of each outcome, and of the others a sentence an outcome."""
    shown: list[TrialReport] = []
    seen: Counter[Outcome] = Counter()
    crossed: Counter[Outcome] = Counter()
    for trial in trials:
        seen[trial.outcome] += 1
        if seen[trial.outcome] <= _FIRST:
            shown.append(trial)
        else:
            crossed[trial.outcome] += trial.trigger.crossed
    rest = [(outcome, times - _FIRST) for outcome, times in seen.items() if times > _FIRST]
    return shown, [f"{n:,} more: {outcome}, the boundary crossed in {crossed[outcome]:,}" for outcome, n in rest]


def unrun_word(arm: ArmReport) -> str:
    """What stands for an arm of which no boot has an end on record; empty for others. One that was begun has a command, and was cut."""
    return "" if arm.trials else CUT if arm.command else NOT_RUN


def few(texts: Sequence[str], most: int) -> list[str]:
    """The first `most` of them, and how many more there are."""
    left = len(texts) - most
    return [*texts[:most], f"and {left:,} more"] if left > 0 else list(texts)


def many(count: int, noun: str) -> str:
    """`1 run`, `2 runs`"""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def cut(text: str, limit: int) -> str:
    """At most so many letters of it; where there are more, the last one says so."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def columns(rows: Sequence[tuple[str, ...]], limits: Sequence[int]) -> list[str]:
    """The rows as lines of aligned columns, each at most `limits` letters wide."""
    short = [tuple(cut(text, limit) for text, limit in zip(row, limits, strict=True)) for row in rows]
    widths = [max(len(row[column]) for row in short) for column in range(len(limits))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in short]


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def latency(value: float | None) -> str:
    if value is None:
        return "at an unknown moment"
    return f"after {value * 1000:.0f} ms" if value < 1 else f"after {value:.1f} s"


def refused_words(statuses: Sequence[int], sent: int) -> str:
    """`1 of 2 requests was refused (400)`"""
    said = ", ".join(f"{one} x {times}" if times > 1 else f"{one}" for one, times in Counter(statuses).items())
    return f"{len(statuses)} of {many(sent, 'request')} {'was' if len(statuses) == 1 else 'were'} refused ({said})"


def refusals(arms: Sequence[ArmReport]) -> list[str]:
    """`eager: 1 of 2 requests was refused (400)`, for each arm in whose boots the server would not take all that was asked of it."""
    found = [(arm.name, [trial for trial in arm.trials if trial.refused]) for arm in arms]
    return [
        f"{name}: {refused_words([one for trial in those for one in trial.refused], sum(trial.requests['sent'] for trial in those))}"
        for name, those in found
        if those
    ]


def outcome_word(trial: TrialReport) -> str:
    """`crash, match`"""
    return trial.outcome + (f", {trial.death.signature}" if trial.death and trial.death.signature else "")


def expected_words(expected: bool | None) -> str:
    return {True: "as expected", False: "a surprise", None: "undecided"}[expected]


def simulated(evidence: str) -> str:
    """The word that stands beside whatever no GPU's vLLM did, empty for those; with a space before it."""
    facts = facts_of(evidence)
    return f" ({facts.mark})" if facts.simulated else ""


def boundary(trial: TrialReport) -> str:
    """What the trigger found, as short as a table allows."""
    if not trial.outcome.facts.tested and not trial.trigger.crossed:
        return "-"
    word = "crossed" if trial.trigger.crossed else "not crossed"
    return f"{word}: {trial.trigger.brief}" if trial.trigger.brief else word


def engine_word(trial: TrialReport) -> str:
    if trial.death is not None:
        return f"died, seen {latency(trial.death.latency_s)}"
    return trial.outcome.facts.engine


def death_line(trial: TrialReport) -> str:
    """`Seen first by the answer after 9 ms, then by log, health, process.`"""
    death = trial.death
    if death is None:
        return ""
    rest = [channel for channel in death.channels if channel != death.detected_by]
    then = f", then by {', '.join(rest)}" if rest else ""
    during = f", after the workload, in {trial.during}" if trial.during else ""
    where = f" {_ranks(trial)}." if death.ranks else ""
    return f"Seen first by {death.detected_by} {latency(death.latency_s)}{then}. Phase: {trial.phase or 'unknown'}{during}.{where}"


def outlasted_line(trial: TrialReport) -> str:
    """`Rank 1's server stayed: it was still there 10 s after the first one was gone, without a word. It was ended, which took 9 s.`"""
    told = []
    for one in trial.outlasted:
        silent = ", without a word" if one.silent else ""
        stayed = f"it was still there {one.watched_s:g} s after the first one was gone{silent}"
        told.append(f"Rank {one.rank}'s server stayed: {stayed}. It was ended, which took {seconds(one.ended_s)}.")
    return " ".join(told)


def _ranks(trial: TrialReport) -> str:
    """`It began with rank 1: logs/reported-1.rank1.log`, or with several at once."""
    ranks = trial.death.ranks if trial.death else ()
    return f"It began with rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}: {', '.join(rank_logs(trial))}"


def rank_logs(trial: TrialReport) -> list[str]:
    """The logs of the nodes that a death over several nodes began with; empty for one node."""
    ranks = trial.death.ranks if trial.death else ()
    return [trial.log.removesuffix(".log") + f".rank{rank}.log" if rank else trial.log for rank in ranks]
