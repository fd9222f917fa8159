"""A bisection of vLLM releases: its record, its answer in one sentence, and both as JSON and as text to paste."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_repro.releases.sources import Source
from vllm_repro.report.format import limited, plural, seconds
from vllm_repro.report.model import issue_url
from vllm_repro.report.text import cell
from vllm_repro.verdict.verdict import Expected
from vllm_repro_search.bisect.plan import UNLIKELY, Answer, Conclusion, Search, State
from vllm_repro_search.record import SearchRecord, page
from vllm_repro_search.versions.release_result import ReleaseResult

__all__ = ["Bisection", "Candidate", "Step", "answer", "bisection_dict", "markdown"]

_ANSWERS = {
    ReleaseResult.LIVES: Answer.GOOD,
    ReleaseResult.DIES: Answer.BAD,
    ReleaseResult.SOMETIMES: Answer.BAD,
}
"""Of a boot. Any other result is a skip."""

_MOST_NAMES = 12
_MOST_ALIKE = 3
_IMPROBABLE = 0.05
"""Chance that a commit boots which imports a name that its tree lacks, before a boot showed that this import is reached."""

_LACKS = re.compile(
    r"cannot import name '(\w+)' from (?:partially initialized module )?'([\w.]+)'|No module named '([\w.]+)'"
)
_EXCEPTION = re.compile(r"\w+(Error|Exception)\b[^:]*: .")


@dataclass(frozen=True)
class Candidate:
    """One vLLM to try."""

    label: str
    source: Source
    # Of a commit; the author's date is as in `2026-05-01`.
    title: str = ""
    date: str = ""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One boot. candidate: its label. why: one line, empty for an answer. run: name of the run's folder, None if there was no server.

    ahead: it ran beside another one, before it was known to be needed.
    """

    candidate: str
    fate: ReleaseResult
    why: str
    run: str | None
    duration_s: float
    ahead: bool = False

    @property
    def tested(self) -> bool:
        return self.fate is not ReleaseResult.INFRA

    @property
    def answer(self) -> Answer:
        return _ANSWERS.get(self.fate, Answer.SKIP)

    @property
    def failure(self) -> str | None:
        """Return the exception of a failed boot or of another crash, without numbers and paths; None if none is known."""
        if self.fate not in (ReleaseResult.BOOT_FAILED, ReleaseResult.FAILS_OTHERWISE) or not _EXCEPTION.match(
            self.why
        ):
            return None
        return re.sub(r"\(?/\S+|\d+", "", self.why)

    @property
    def lacks(self) -> str | None:
        """Return the name that a failed boot could not import, as in `vllm.utils.has_x`."""
        found = _LACKS.search(self.why) if self.answer is Answer.SKIP else None
        return found and (found[3] or f"{found[2]}.{found[1]}")


@dataclass(frozen=True, kw_only=True)
class Bisection(SearchRecord):
    """A bisection.

    candidates: oldest first. left_out: commits between them that change nothing that is run. find_fix: the oldest is bad.
    untouched: labels of commits that change no file that the servers of both ends opened, None if it is not known yet.
    missing: by label of a commit, the names that such files import and its tree does not define (`missing_names`).
    rate, confidence: see `Search`. script: the command that answered instead of a server, if one did.
    """

    expected: Expected
    find_fix: bool
    candidates: tuple[Candidate, ...]
    rate: float
    confidence: float
    left_out: int = 0
    script: str | None = None
    untouched: tuple[str, ...] | None = None
    missing: Mapping[str, Sequence[str]] = field(default_factory=dict)
    steps: tuple[Step, ...] = ()

    @property
    def boots(self) -> tuple[Step, ...]:
        return self.steps

    @property
    def from_good(self) -> tuple[Candidate, ...]:
        """Return the candidates as the search numbers them, from the good end to the bad end."""
        return self.candidates[::-1] if self.find_fix else self.candidates

    @property
    def search(self) -> Search:
        """Return the search after all steps."""
        made_by = self.from_good[:-1] if self.find_fix else self.from_good[1:]
        weights = tuple(UNLIKELY if one.label in (self.untouched or ()) else 1.0 for one in made_by)
        foretold = {step.candidate for step in self.steps if step.lacks in self.missing.get(step.candidate, ())}
        never, improbable = foretold | self.hopeless.keys(), self.missing
        chances = tuple(
            0.0 if one.label in never else _IMPROBABLE if one.label in improbable else 1.0 for one in self.from_good
        )
        found = Search(
            size=len(self.candidates), rate=self.rate, confidence=self.confidence, weights=weights, chances=chances
        )
        place = {candidate.label: number for number, candidate in enumerate(self.from_good)}
        for step in self.steps:
            found = found.after(place[step.candidate], step.answer)
        return found

    @property
    def hopeless(self) -> dict[str, str]:
        """Return the labels of commits that would fail like one that was booted, each with the reason.

        Either it lacks a name that a boot could not import, or it lies between two that failed with the same exception, and no boot
        between them gave an answer.
        """
        answered = {step.candidate for step in self.steps if step.answer is not Answer.SKIP}
        reached = {name for label in answered for name in self.missing.get(label, ())}
        proven = {step.lacks for step in self.steps} - reached
        found = {}
        for label, names in self.missing.items():
            if lacked := next((name for name in names if name in proven), None):
                found[label] = f"cannot import {lacked}"
        last = {step.candidate: step.failure for step in self.steps}
        first: dict[str, int] = {}
        for place, one in enumerate(self.candidates):
            if one.label in answered:
                first = {}
            elif failure := last.get(one.label):
                for other in self.candidates[first.setdefault(failure, place) : place]:
                    found.setdefault(other.label, f"between commits that fail with {failure.partition(':')[0]}")
        return {label: reason for label, reason in found.items() if label not in last}

    @property
    def exit_status(self) -> int:
        """Return 0 for an answer, 1 for a surprise (an end that is not as named, or several changes), 2 if undecided."""
        known = self.search.conclusion()
        if known.state.wrong_end:
            # An end that could not be tried contradicts nothing.
            return 1 if any(step.answer is not Answer.SKIP for step in self.of(self.wrong_end(known))) else 2
        if known.good_again:
            return 1
        return 0 if known.state is State.FOUND else 2

    def wrong_end(self, known: Conclusion) -> str:
        """Return the label of the end that is wrong."""
        return self.from_good[0 if known.state is State.GOOD_END_WRONG else -1].label

    def of(self, label: str) -> list[Step]:
        """Return the steps of one candidate."""
        return [step for step in self.steps if step.candidate == label]

    def changes(self, known: Conclusion) -> list[str]:
        """Return the labels that may be the first bad one, or the first fixed one, oldest first."""
        points = (point - self.find_fix for point in known.left)
        labels = [self.from_good[point].label for point in points if 0 <= point < len(self.candidates)]
        return labels[::-1] if self.find_fix else labels


def answer(bisection: Bisection) -> str:
    """Return the answer in one or two sentences."""
    known = bisection.search.conclusion()
    what = "first fixed" if bisection.find_fix else "first bad"
    if known.state.wrong_end:
        label = bisection.wrong_end(known)
        named = "good" if known.state is State.GOOD_END_WRONG else "bad"
        return f"No answer: {label} is named as {named}, and {_did(bisection, label)}. Next: {_next(bisection, label, named)}."
    changes = bisection.changes(known)
    if known.state is State.FOUND:
        good, bad = (bisection.from_good[known.left[0] + offset].label for offset in (-1, 0))
        first, second = (good, bad) if bisection.find_fix else (bad, good)
        title = "".join(f" ({one.title})" for one in bisection.candidates if one.label == first and one.title)
        text = f"The {what} one is {first}{title}: it {_did(bisection, first)}; {second} {_did(bisection, second)}."
    else:
        text = f"Undecided: the {what} one is one of {', '.join(limited(changes, _MOST_NAMES))} ({len(changes)})."
        if known.state is State.STUCK:
            text += f" Those between could not be tried: {'; '.join(_untried(bisection, known))}."
        for end, named in zip((bisection.from_good[0], bisection.from_good[-1]), ("good", "bad"), strict=True):
            if not bisection.of(end.label):
                text += f" This holds if {end.label} is {named}: it was not booted."
    for number in known.good_again:
        label = bisection.from_good[number].label
        text += f" There is more than one change: {label} {_did(bisection, label)}, although it is on the bad side."
    return text


def _next(bisection: Bisection, label: str, named: str) -> str:
    """Return what to do about a wrong end."""
    if all(step.answer is Answer.SKIP for step in bisection.of(label)):
        return f"name a --{named} near it that boots"
    if named == "bad":
        return "name another --bad; if the bug shows in some boots only, add --rate with their share"
    return f"name {'a newer' if bisection.find_fix else 'an older'} --good"


def _untried(bisection: Bisection, known: Conclusion) -> list[str]:
    """Return the skips among the candidates left, those that failed alike together, and how many others were not booted, and why."""
    gap = _gap(bisection, known)
    skips = [step for step in bisection.steps if step.answer is Answer.SKIP and step.candidate in gap]
    alike: dict[tuple[str, str], list[Step]] = {}
    for step in skips:
        alike.setdefault((step.fate, step.failure or step.why), []).append(step)
    booted = [
        f"{', '.join(limited([one.candidate for one in steps], _MOST_ALIKE))} {steps[0].fate}"
        + (f" ({steps[0].why})" if steps[0].why else "")
        for steps in alike.values()
    ]
    others = Counter(reason for label, reason in bisection.hopeless.items() if label in gap)
    return booted + [f"{plural(number, 'other')} not booted: {reason}" for reason, number in others.items()]


def _gap(bisection: Bisection, known: Conclusion) -> set[str]:
    return {candidate.label for candidate in bisection.from_good[known.left[0] : known.left[-1]]}


def _did(bisection: Bisection, label: str) -> str:
    """Return `died in 2 of 3 boots`, `lived in 1 of 1 boots`, or why it could not be tried."""
    steps = bisection.of(label)
    bad, good = (sum(step.answer is kind for step in steps) for kind in (Answer.BAD, Answer.GOOD))
    if bad or good:
        if bisection.script:
            return f"is {'bad' if bad else 'good'} in {bad or good} of {plural(bad + good, 'run')} of the script"
        did, count = (bisection.expected.did, bad) if bad else ("lived", good)
        return f"{did} in {count} of {bad + good} boots"
    return f"could not be tried ({steps[-1].fate}: {steps[-1].why})" if steps else "was not booted"


def _certainty(bisection: Bisection) -> str:
    known = bisection.search.conclusion()
    if known.state.wrong_end or not bisection.steps:
        return ""
    often, did = (
        ("a bad one fails in {} run", "run")
        if bisection.script
        else (f"a bad one {bisection.expected} in {{}} boot", "booted")
    )
    if bisection.rate == 1 and round(known.probability, 6) == 1:
        return f"This holds if {often.format('every')} (--rate 1): each was {did} once."
    return f"Probability {known.probability:.1%}, if {often.format(f'{bisection.rate:.0%} of')}s (--rate {bisection.rate:g})."


def bisection_dict(bisection: Bisection) -> dict[str, Any]:
    """Return the content of `bisection.json`. `answer` is null unless there is one; `ahead` is left out of a step if it is false."""
    known = bisection.search.conclusion()
    changes = bisection.changes(known)
    return {
        "schema": 1,
        **asdict(bisection),
        "candidates": [asdict(candidate) | {"source": f"{candidate.source}"} for candidate in bisection.candidates],
        "steps": [
            {name: value for name, value in asdict(step).items() if value or name != "ahead"}
            for step in bisection.steps
        ],
        "state": known.state,
        "answer": changes[0] if known.state is State.FOUND else None,
        "left": changes,
        "probability": round(known.probability, 6),
        "good_again": [bisection.from_good[number].label for number in known.good_again],
        "reading": answer(bisection),
    }


def markdown(bisection: Bisection) -> str:
    """Return `bisection.md`, which lies in `<scenario>/bisect/<id>/` and links to runs from there."""
    what = "first fixed" if bisection.find_fix else "first bad"
    first, last = bisection.candidates[0].label, bisection.candidates[-1].label
    tried = f"{plural(len(bisection.steps), 'run' if bisection.script else 'boot')} among {len(bisection.candidates)} candidates"
    parts = [
        *_commits(bisection),
        f"<details><summary>{tried}</summary>\n\n{_table(bisection)}\n\n</details>",
    ]
    if ahead := [step.duration_s for step in bisection.steps if step.ahead]:
        whole = sum(step.duration_s for step in bisection.steps) / 3600
        parts.append(
            f"{plural(len(ahead), 'boot')} ran beside another one, before it was known if {'they were' if len(ahead) > 1 else 'it was'} "
            f"needed: {sum(ahead) / 3600:.2f} of {whole:.2f} server hours."
        )
    if any(candidate.title for candidate in bisection.candidates):
        text = "Each commit's Python code ran over the compiled parts of a CPU release, which each run's report names."
        if bisection.script:
            text = "Each commit's Python code was laid over the compiled parts of a CPU release."
        if bisection.left_out:
            text += f" Not tried: {plural(bisection.left_out, 'commit')} that change{'s' * (bisection.left_out == 1)} nothing under vllm/."
        if bisection.untouched:
            text += (
                f" {plural(len(bisection.untouched), 'candidate')} change{'s' * (len(bisection.untouched) == 1)} no file that the "
                f"servers of the two ends opened. Each counts as {UNLIKELY:g} of another one, so it is booted late, if at all."
            )
        if bisection.missing:
            text += (
                f" {plural(len(bisection.missing), 'candidate')} {'import' if len(bisection.missing) > 1 else 'imports'} a name that its "
                "own tree does not define. Such a commit is booted late, and not at all once a boot of another one failed for that name."
            )
        parts.append(text)
    reading = f"**{cell(answer(bisection))}** {_certainty(bisection)}".strip()
    return page(bisection, f"{what} vLLM from {first} to {last}", reading, parts, version="")


def _commits(bisection: Bisection) -> list[str]:
    """Return one list of the commits that are left, if they are few: date, title and pull request."""
    known = bisection.search.conclusion()
    changes = bisection.changes(known)
    if known.state not in (State.FOUND, State.STUCK) or len(changes) > _MOST_NAMES:
        return []
    left = [one for one in bisection.candidates if one.label in changes and one.title]
    return (
        ["\n".join(f"- {one.label}, {one.date}: {cell(one.title)}{_pull_request(one)}" for one in left)] if left else []
    )


def _pull_request(commit: Candidate) -> str:
    """Return a link to the pull request that vLLM's squashed commits name at the end of their title."""
    found = re.search(r"\(#(\d+)\)$", commit.title)
    return f" <{issue_url(f'vllm-project/vllm#{found[1]}')}>" if found else ""


def _table(bisection: Bisection) -> str:
    lines = ["| boot | vLLM | answer | result | took | run |", "|---|---|---|---|---|---|"]
    for number, step in enumerate(bisection.steps, 1):
        did = bisection.expected if step.fate is ReleaseResult.DIES else step.fate
        parts = ("" if bisection.script and step.tested else did, step.why)
        result = ": ".join(filter(None, parts)) or "-"
        run = f"[{step.run}](../../{step.run}/report.md)" if step.run else "-"
        lines.append(
            f"| {number} | {cell(step.candidate)} | {step.answer} | {cell(result)} | {seconds(step.duration_s)} | {run} |"
        )
    return "\n".join(lines)
