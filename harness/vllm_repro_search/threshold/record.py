"""A search of the shortest prompt that crashes: its record, its answer in sentences, and both as JSON and as text to paste."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from vllm_repro.report.format import limited, plural, seconds
from vllm_repro.report.text import cell
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_search.record import SearchRecord, page
from vllm_repro_search.threshold.plan import Answer, Probe, Search, State

__all__ = ["Boot", "Threshold", "answer", "markdown", "threshold_dict"]

_MOST_LENGTHS = 12


@dataclass(frozen=True, kw_only=True)
class Boot:
    """One boot. probes: the prompts that gave an answer or a skip, in order. run: name of the run's folder."""

    probes: tuple[Probe, ...]
    outcome: Outcome
    why: str
    run: str
    duration_s: float

    @property
    def tested(self) -> bool:
        return bool(self.probes)


@dataclass(frozen=True, kw_only=True)
class Threshold(SearchRecord):
    """A search of the shortest crashing prompt. low, high, guess: see `Search`. version: the release that the servers reported."""

    version: str | None = None
    low: int
    high: int
    guess: int
    boots: tuple[Boot, ...] = ()

    @property
    def search(self) -> Search:
        """Return the search after all boots."""
        probes = (probe for boot in self.boots for probe in boot.probes)
        return Search(low=self.low, high=self.high, guess=self.guess).after(*probes)

    @property
    def exit_status(self) -> int:
        """Return 0 for an answer (a length, none or all), 1 for a surprise, 2 if undecided."""
        match self.search.state:
            case State.FOUND | State.QUIET | State.ALL:
                return 0
            case State.SURPRISE:
                return 1
            case State.OPEN | State.STUCK:
                return 2


def answer(found: Threshold) -> str:
    """Return the answer in a few sentences."""
    search = found.search
    crash, quiet = search.shortest_crash, search.longest_quiet
    skipped = search.lengths(Answer.SKIP) - search.lengths(Answer.CRASH) - search.lengths(Answer.QUIET)
    unanswered = f" Prompts without an answer: {_tokens(skipped)}." if skipped else ""
    if not found.boots:
        return "Undecided: no boot has finished."
    match search.state:
        case State.QUIET:
            sent = search.lengths(Answer.QUIET)
            lengths = f"{plural(len(sent), 'length')} from {min(sent):,} to {max(sent):,} tokens"
            return f"None of {lengths} crashes it. The trigger computes {found.guess:,}."
        case State.ALL:
            return f"The shortest prompt that was sent crashes: {found.low:,} tokens. The trigger computes {found.guess:,}."
        case State.SURPRISE:
            return (
                f"No threshold: a prompt of {crash:,} tokens crashed, and {_tokens(search.quiet_above)} did not. "
                "It is not a matter of length alone."
            )
        case State.FOUND:
            same = "as the trigger computes" if crash == found.guess else f"the trigger computes {found.guess:,}"
            text = f"The shortest prompt that crashes has {crash:,} tokens ({same}); {quiet:,} do not crash."
            if any(one.first and (one.length, one.answer) == (crash, Answer.CRASH) for one in search.probes):
                text += " It crashes alone on a fresh server, too."
            else:
                text += " Other prompts came before it; alone it gave no answer."
            if longer := search.lengths(Answer.CRASH) - {crash}:
                text += f" Longer ones crash: {_tokens(longer)}."
            return text + unanswered
        case State.OPEN if crash is not None and crash - 1 == quiet:
            return f"A prompt of {crash:,} tokens crashed, {quiet:,} did not. The checks are not finished."
        case State.OPEN | State.STUCK:
            if quiet is None:
                known = (
                    "no prompt gave an answer"
                    if crash is None
                    else f"{crash:,} tokens crash, and no shorter prompt was answered"
                )
                return f"Undecided: {known}.{unanswered}"
            if crash is None and quiet == found.high:
                return f"Undecided: no prompt that was answered crashed it, up to {quiet:,} tokens.{unanswered}"
            high = f"at most {crash:,}" if crash is not None else f"if any, up to {found.high:,}"
            return f"Undecided: the shortest prompt that crashes has above {quiet:,}, {high} tokens.{unanswered}"


def _tokens(lengths: Iterable[int]) -> str:
    return ", ".join(limited([f"{one:,}" for one in sorted(lengths)], _MOST_LENGTHS))


def threshold_dict(found: Threshold) -> dict[str, Any]:
    """Return the content of `threshold.json`. `answer` is null unless a length was found."""
    search = found.search
    return {
        "schema": 1,
        **asdict(found),
        "state": search.state,
        "answer": search.shortest_crash if search.state is State.FOUND else None,
        "shortest_crash": search.shortest_crash,
        "longest_quiet": search.longest_quiet,
        "reading": answer(found),
    }


def markdown(found: Threshold) -> str:
    """Return `threshold.md`, which lies in `<scenario>/threshold/<id>/` and links to runs beside it."""
    crashes = sum(boot.outcome is Outcome.CRASH for boot in found.boots)
    probes = len(found.search.probes)
    summary = f"{plural(probes, 'prompt')} in {plural(len(found.boots), 'boot')}, {crashes} of which crashed"
    table = [f"<details><summary>{summary}</summary>\n\n{_table(found)}\n\n</details>"] if found.boots else []
    reading = f"**{cell(answer(found))}**"
    return page(found, "the shortest prompt that crashes", reading, table, version=found.version)


def _table(found: Threshold) -> str:
    lines = ["| boot | prompts, in tokens | result | took | run |", "|---|---|---|---|---|"]
    for number, boot in enumerate(found.boots, 1):
        probes = ", ".join(f"{probe.length:,} {probe.answer}" for probe in boot.probes) or "none"
        known = boot.outcome is Outcome.CRASH or boot.outcome.facts.alive
        result = boot.outcome if known else f"{boot.outcome}: {boot.why}"
        run = f"[{boot.run}](../{found.scenario}/{boot.run}/report.md)"
        lines.append(f"| {number} | {probes} | {cell(result)} | {seconds(boot.duration_s)} | {run} |")
    return "\n".join(lines)
