"""A search of the shortest prompt that crashes: its record, its answer in sentences, and both as JSON and as text to paste."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vllm_repro.report.format import limited, plural, seconds
from vllm_repro.report.model import banner, issue_url
from vllm_repro.report.text import cell, fence
from vllm_repro.report.wording import simulated
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.threshold import Answer, Probe, Search, State

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


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """A search, perhaps unfinished.

    low, high, guess: see `Search`. evidence: None if no server ever started. version: the release that the servers reported. status: what
    the scenario declares. stopped: why it ended early.
    """

    scenario: str
    issue: str
    title: str
    status: Mapping[str, Any]
    arm: str
    server: str
    evidence: str | None
    version: str | None
    low: int
    high: int
    guess: int
    harness_version: str
    started_at: str
    duration_s: float
    reproduce: str
    boots: tuple[Boot, ...] = ()
    stopped: str | None = None

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
    parts = [f"# {found.scenario}: the shortest prompt that crashes{simulated(found.evidence or '')}"]
    if notice := banner(found.evidence or "", found.version):
        parts.append(f"> **{notice}**")
    if found.stopped:
        parts.append(f"> **Stopped by {found.stopped}: this is what was known then.**")
    parts.append(f"{found.title} ([{found.issue}]({issue_url(found.issue)})). Arm: {found.arm}.")
    parts.append(f"**{cell(answer(found))}**")
    if found.boots:
        crashes = sum(boot.outcome is Outcome.CRASH for boot in found.boots)
        probes = len(found.search.probes)
        summary = f"{plural(probes, 'prompt')} in {plural(len(found.boots), 'boot')}, {crashes} of which crashed"
        parts.append(f"<details><summary>{summary}</summary>\n\n{_table(found)}\n\n</details>")
    parts.append(
        f"vLLM: {found.version or 'unknown'}, server: {found.server}, evidence: {found.evidence or 'none'}. "
        f"vllm-repro {found.harness_version}, started {found.started_at}, took {found.duration_s:.0f} s."
    )
    parts.append(fence(found.reproduce, "console"))
    return "\n\n".join(parts) + "\n"


def _table(found: Threshold) -> str:
    lines = ["| boot | prompts, in tokens | result | took | run |", "|---|---|---|---|---|"]
    for number, boot in enumerate(found.boots, 1):
        probes = ", ".join(f"{probe.length:,} {probe.answer}" for probe in boot.probes) or "none"
        known = boot.outcome is Outcome.CRASH or boot.outcome.facts.alive
        result = boot.outcome if known else f"{boot.outcome}: {boot.why}"
        run = f"[{boot.run}](../{found.scenario}/{boot.run}/report.md)"
        lines.append(f"| {number} | {probes} | {cell(result)} | {seconds(boot.duration_s)} | {run} |")
    return "\n".join(lines)
