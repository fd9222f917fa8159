"""Output checks: whether the answers of a living engine are right. Pure.

    output=checks(longest_run=32, distinct=0.1, same=16, baseline="eager")
    output=checks(alike=[("first", "again")])

After the workload each arm gets the same question and decodes greedily. Some answers are wrong
without a comparison: one token repeated, a number of a long prompt not found. The stronger check
compares with the baseline arm: the same weights and prompt give the same first tokens, with any
graphs or caches. Later tokens may differ, because sums in another order round differently.

Random weights repeat tokens although the engine is right. So their answers are only compared, and
those of dummy weights not at all. Made weights (`releases.weights`) are compared with the baseline
arm if two conditions hold: another beginning of the text changes that arm's answer, and its token
at the first difference was clearly likelier than the next best.

The second form compares answers to equal requests of one boot's workload. The same engine must
answer them alike, with any weights.

`run --outputs` compares without a declaration. After the workload each of its greedy prompts is
sent alone, first without and then with its blocks in the prefix cache. Answers to the same prompt,
from the workload and from a burst of all prompts, are compared with these (`compare_alone`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby, takewhile

QUESTION = (
    "The bicycle was not invented by one person on one day. Its history begins in the early"
    " nineteenth century, when"
)
"""Prose, which a model continues without repeating itself."""

BEGINNING = (
    "The telescope was not invented by one person on one day. Its history begins in the early"
    " nineteenth century, when"
)
"""`QUESTION` with another second word.

A model that attends that far back continues it differently.
"""

CLEAR = 0.5
"""Least margin, in nats, of a token over the next best one for a difference there to count.

Another order of sums in bfloat16 changes about a tenth of that.
"""

KEPT = 64
"""Most leading tokens of an answer that the journal keeps."""


class Probe(StrEnum):
    """Kind of an answer in the output check: to a fixed question, or to a workload's prompt."""

    GREEDY = "greedy"  # continue `QUESTION`
    BEGINNING = "beginning"  # continue `BEGINNING`
    NEEDLE = "needle"  # find a number in the middle of a long prompt
    WORKLOAD = "workload"  # a request of the workload itself
    # the prompt of such a request, with no other request and nothing of it in the prefix cache
    ALONE = "alone"
    CACHED = "alone, cached"  # the same, with its blocks in the prefix cache
    BURST = "burst"  # the prompt of such a request, sent at once with the others
    BURST_CACHED = "burst, cached"  # the same, with its blocks in the prefix cache


class ServedWeights(StrEnum):
    """Kind of model weights that the answers come from."""

    REAL = "real"
    DUMMY = "dummy"  # random numbers
    MADE = "made"  # random numbers of such sizes that each token depends on all before it
    # A rehearsal: made-up words, never repeated unless a fault requires it.
    IMITATED = "imitated"


@dataclass(frozen=True, kw_only=True)
class Checks:
    """Output checks of a scenario, in each arm whose engine lives.

    None: not checked. Raises `ValueError` if nothing is checked, or if a value is out of range.
    """

    # Longest run of one token that is allowed.
    longest_run: int | None = None
    # Least share of different tokens, above 0 to 1.
    distinct: float | None = None
    # Number of first tokens that must equal those of the arm `baseline`.
    same: int | None = None
    # Length in tokens of the prompt with a number to find.
    needle: int | None = None
    # Name of the arm that answers rightly; needs `same`.
    baseline: str = ""
    # Length in tokens of the answer to a question.
    tokens: int = KEPT
    # Groups of names of equal requests in the workload that need equal answers.
    alike: Sequence[Sequence[str]] = ()

    def __post_init__(self) -> None:
        longest_run, distinct, tokens = self.longest_run, self.distinct, self.tokens
        same, needle = self.same, self.needle
        if not (self.asks or self.alike):
            raise ValueError(
                "checks() needs at least one of longest_run=, distinct=, same=, needle= or alike="
            )
        if any(len(set(group)) != len(group) or len(group) < 2 for group in self.alike):
            raise ValueError(
                'each group of alike= is two names of requests or more: alike=[("first", "again")]'
            )
        if longest_run is not None and not 1 <= longest_run < tokens:
            raise ValueError(
                f"longest_run={longest_run} must be from 1 to {tokens - 1}, below the answer's"
                f" {tokens} tokens"
            )
        if distinct is not None and not 0 < distinct <= 1:
            raise ValueError("distinct must be more than 0 and at most 1")
        if (same is not None) is not bool(self.baseline):
            raise ValueError(
                'same= needs baseline="…", the arm to compare with, and baseline= needs same='
            )
        if same is not None and not 1 <= same <= min(tokens, KEPT):
            raise ValueError(f"same={same} must be from 1 to {min(tokens, KEPT)} tokens")
        if needle is not None and needle < 100:
            raise ValueError(f"needle={needle} must be 100 tokens or more")

    @property
    def asks(self) -> bool:
        """Return True if questions are asked after the workload."""
        return any(
            setting is not None
            for setting in (self.longest_run, self.distinct, self.same, self.needle)
        )

    @property
    def compared(self) -> frozenset[str]:
        """Names of the requests in `alike`, whose answers are compared."""
        return frozenset(name for group in self.alike for name in group)


@dataclass(frozen=True, kw_only=True)
class OutputSample:
    """Sample of one answer for the output check: first tokens, hash, repetition, margins."""

    probe: Probe
    # Tokens of the whole answer.
    length: int
    # Of the text.
    sha256: str
    # First tokens: ids, or pieces of text if the server returns no ids.
    first: tuple[int | str, ...]
    # Of the whole answer: tokens of the longest run of one token.
    longest_run: int
    # Share of different tokens in the whole answer; 0 without tokens.
    distinct: float
    # The needle is in the answer; None without a needle.
    found: bool | None = None
    # Nats by which each first token was likelier than the next best; empty if the server returns no
    # log probabilities.
    margins: tuple[float, ...] = ()
    # Name of the request of the workload.
    name: str = ""
    # Hash of the inputs that decide the answer; empty if it is not compared with answers alone.
    prompt: str = ""


def probes(checks: Checks, weights: ServedWeights | None) -> tuple[Probe, ...]:
    """Return the questions to ask a model with these weights, in order.

    `GREEDY` is always asked, `BEGINNING` only of made weights. `NEEDLE` is asked if it is declared,
    but not of dummy or made weights, which cannot find a needle. weights: None if only the log
    names them.
    """
    due = [Probe.GREEDY]
    if weights is ServedWeights.MADE:
        due.append(Probe.BEGINNING)
    if checks.needle is not None and weights not in (ServedWeights.DUMMY, ServedWeights.MADE):
        due.append(Probe.NEEDLE)
    return tuple(due)


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Return how many leading tokens are the same in both sequences."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )


def longest_run(tokens: Sequence[int | str]) -> int:
    """Return the length of the longest run of the same token; 0 without tokens."""
    return max((sum(1 for _ in run) for _, run in groupby(tokens)), default=0)


def sample_output(
    probe: Probe,
    tokens: Sequence[int | str],
    text: str,
    *,
    needle: str = "",
    margins: Sequence[float] = (),
    name: str = "",
    prompt: str = "",
) -> OutputSample:
    """Return what the output check keeps of an answer: first tokens, hash, repetition.

    needle: the text that it should hold. name, prompt: as in `OutputSample`.
    """
    return OutputSample(
        probe=probe,
        length=len(tokens),
        sha256=hashlib.sha256(text.encode("utf-8", "replace")).hexdigest(),
        first=tuple(tokens[:KEPT]),
        longest_run=longest_run(tokens),
        distinct=len(set(tokens)) / len(tokens) if tokens else 0.0,
        found=needle in text if needle else None,
        margins=tuple(round(margin, 3) for margin in margins[:KEPT]),
        name=name,
        prompt=prompt,
    )


def check_output(
    checks: Checks | None, answers: Sequence[OutputSample], weights: ServedWeights | None
) -> str | None:
    """Return a sentence about the first wrong answer of one trial, without comparing arms.

    None if no answer is wrong, or if these weights do not allow the check. Answers to `alike`
    requests are compared with any weights, and those of the workload with answers to the same
    prompts alone (`compare_alone`) with real and made ones. checks: None if the scenario declares
    none.
    """
    if differ := compare_alone(answers, weights).wrong:
        return differ
    if checks is None:
        return None
    if differ := _compare_alike(checks, answers).wrong:
        return differ
    if weights in (None, ServedWeights.DUMMY, ServedWeights.MADE):
        return None
    for answer in answers:
        if answer.probe in (*_REFERENCES, *_COMPARED):
            continue
        if answer.probe is Probe.NEEDLE:
            if answer.found is False and weights is ServedWeights.REAL:
                return f"the number in the middle of {checks.needle:,} tokens was not found"
            continue
        if checks.longest_run is not None and answer.longest_run > checks.longest_run:
            return (
                f"one token {answer.longest_run} times in a row, in an answer of {answer.length}"
                " tokens"
            )
        if checks.distinct is not None and answer.distinct < checks.distinct:
            return (
                f"only {answer.distinct * answer.length:.0f} different tokens in an answer of"
                f" {answer.length}"
            )
    return None


@dataclass(frozen=True, kw_only=True)
class OutputComparison:
    """Result of comparing answers: what is wrong, or why the comparison proves nothing.

    Both fields are empty if nothing differs.
    """

    # Sentence about the difference; empty without one.
    wrong: str = ""
    # Sentence about why the comparison decides nothing; empty if it does.
    unknown: str = ""


def compare_output(
    checks: Checks,
    answers: Sequence[OutputSample],
    baseline: Sequence[Sequence[OutputSample]],
    weights: ServedWeights | None,
) -> OutputComparison:
    """Compare the `alike` answers of one trial, then its greedy answer with the baseline arm's.

    baseline: the answers of each of its trials. If these differ, the model is not deterministic and
    the comparison proves nothing. With made weights it also proves nothing if the baseline ignores
    the beginning of the question, or had no clear best token at the first difference.
    """
    alike = _compare_alike(checks, answers)
    if alike.wrong or (checks.alike and checks.same is None):
        return alike
    if checks.same is None:
        return OutputComparison(unknown="no baseline is declared")
    if weights in (None, ServedWeights.DUMMY):
        return OutputComparison(unknown="answers of dummy weights are neither right nor wrong")
    ours = _answer_to(Probe.GREEDY, answers)
    theirs = [answer for trial in baseline if (answer := _answer_to(Probe.GREEDY, trial))]
    if ours is None:
        return OutputComparison(unknown="the question was not asked")
    name = checks.baseline
    if not theirs:
        return OutputComparison(
            unknown=f"there is no answer of {name} to compare with (--arm {name})"
        )
    if len({answer.first[: checks.same] for answer in theirs}) != 1:
        return OutputComparison(unknown=f"{name} does not repeat its own answer")
    made = weights is ServedWeights.MADE
    if made and not all(_attends_back(trial, checks.same) for trial in baseline):
        return OutputComparison(
            unknown=f"{name} answers the same after another beginning, so its answer proves nothing"
        )
    right = theirs[0]
    mine, its = ours.first[: checks.same], right.first[: checks.same]
    if mine == its:
        return OutputComparison()
    equal = common_prefix(mine, its)
    after = _after(equal)
    if made and right.margins[equal : equal + 1] < (CLEAR,):
        return OutputComparison(
            unknown=f"the answers differ {after}, where {name} had no clear best token"
        )
    return OutputComparison(
        wrong=(
            f"its greedy answer differs from that of {name} {after}; the first {checks.same} should"
            " be equal"
        )
    )


def _compare_alike(checks: Checks, answers: Sequence[OutputSample]) -> OutputComparison:
    """Compare the answers to requests of one workload that the scenario declares equal.

    Their whole texts must be equal. With log probabilities a difference proves nothing if the
    margins of both tokens there add up to less than `CLEAR`, or were not kept. A missing answer
    proves nothing, too. Return the first wrong pair, else the first that proves nothing.
    """
    by_name = {answer.name: answer for answer in answers if answer.probe is Probe.WORKLOAD}
    unknown = ""
    for first, *others in checks.alike:
        missing = [name for name in (first, *others) if name not in by_name]
        unknown = unknown or (f"{missing[0]!r} has no answer to compare" if missing else "")
        for name in others:
            if missing or by_name[name].sha256 == by_name[first].sha256:
                continue
            what = f"the equal requests {first!r} and {name!r} were answered differently"
            at = (
                _first_difference(by_name[first], by_name[name])
                if _have_token_ids(by_name[first], by_name[name])
                else None
            )
            margins = by_name[first].margins or by_name[name].margins
            if at is None and margins and _have_token_ids(by_name[first], by_name[name]):
                unknown = unknown or f"{what} after the tokens whose margins are kept"
                continue
            if (
                at is not None
                and margins
                and _margin(by_name[first], at) + _margin(by_name[name], at) < CLEAR
            ):
                unknown = unknown or f"{what} {_after(at)}, where neither had a clear best token"
                continue
            return OutputComparison(wrong=what if at is None else f"{what} {_after(at)}")
    return OutputComparison(unknown=unknown)


def compare_alone(
    answers: Sequence[OutputSample], weights: ServedWeights | None
) -> OutputComparison:
    """Compare answers from the workload and the burst with those to the same prompts sent alone.

    An answer is wrong if it differs from all answers alone, these agree with each other up to and
    at the first different token, and rounding cannot explain it: the margins of the two tokens
    there add up to `CLEAR` or more. Unless both answers used the prefix cache, the sum must also
    reach twice the most by which the cache changes a margin, because a quantized cache rounds.

    Return the first wrong answer, else the first that decides nothing. Skip an answer whose prompt
    was not sent alone both with and without the cache. Dummy, imitated and unknown weights decide
    nothing.
    """
    alone: dict[str, list[OutputSample]] = {}
    for answer in answers:
        if answer.probe in _REFERENCES:
            alone.setdefault(answer.prompt, []).append(answer)
    if alone and weights is None:
        return OutputComparison(unknown="it is not known which weights are served")
    if alone and weights not in (ServedWeights.REAL, ServedWeights.MADE):
        return OutputComparison(unknown="answers of dummy weights are neither right nor wrong")
    rounding = max(map(_rounding, alone.values()), default=0.0)
    unknown = ""
    for answer in answers:
        references = alone.get(answer.prompt, [])
        if answer.probe not in _COMPARED or len(
            {reference.probe for reference in references}
        ) < len(_REFERENCES):
            continue
        clear = max(CLEAR, 2 * rounding)
        if answer.probe is Probe.BURST_CACHED:
            references, clear = (
                [reference for reference in references if reference.probe is Probe.CACHED],
                CLEAR,
            )
        comparison = _compare_with(references, answer, clear)
        if comparison.wrong:
            return comparison
        unknown = unknown or comparison.unknown
    return OutputComparison(unknown=unknown)


_REFERENCES = (Probe.ALONE, Probe.CACHED)
_COMPARED = (Probe.WORKLOAD, Probe.BURST, Probe.BURST_CACHED)


def _compare_with(
    alone: Sequence[OutputSample], answer: OutputSample, clear: float
) -> OutputComparison:
    """Compare an answer with those to the same prompt sent alone, at the first different token.

    clear: the difference counts if both tokens' leads over their next best add up to this, in nats.
    """
    if not _have_token_ids(answer, *alone):
        return OutputComparison(unknown="this server returns no token ids")
    places = [_first_difference(reference, answer) for reference in alone]
    if None in places:
        return OutputComparison()
    at = min(place for place in places if place is not None)
    where = "in the workload" if answer.probe is Probe.WORKLOAD else "beside others"
    what = f"{answer.name} was answered differently {where} and alone {_after(at)}"
    if len({reference.first[: at + 1] for reference in alone}) > 1:
        return OutputComparison(unknown=f"{what}, where its answers alone differ too")
    moved = min(_margin(reference, at) for reference in alone) + _margin(answer, at)
    if moved < clear:
        return OutputComparison(unknown=f"{what}, where no token was clearly the best")
    tokens = f"{_token(answer, at)}, alone {_token(alone[0], at)}"
    return OutputComparison(
        wrong=f"{what}: {tokens}; their log probabilities moved by {moved:.2f} nats or more"
    )


def _margin(answer: OutputSample, at: int) -> float:
    """Return by how many nats the token at `at` was likelier than the next best; 0 if unknown."""
    return answer.margins[at] if at < len(answer.margins) else 0.0


def _rounding(alone: Sequence[OutputSample]) -> float:
    """Return the most, in nats, by which the prefix cache changed a token's lead on the next best.

    alone: answers to one prompt, with and without the cache. 0 if either is missing.
    """
    first, cached = _answer_to(Probe.ALONE, alone), _answer_to(Probe.CACHED, alone)
    if first is None or cached is None:
        return 0.0
    at = _first_difference(first, cached)
    turned = 0.0 if at is None else _margin(first, at) + _margin(cached, at)
    equal = zip(first.margins[:at], cached.margins[:at], strict=False)
    return max([turned, *(abs(before - after) for before, after in equal)])


def _first_difference(left: OutputSample, right: OutputSample) -> int | None:
    """Return the index of the first different kept token; None if all are equal.

    If one answer ends there, the index is that end.
    """
    equal = common_prefix(left.first, right.first)
    return equal if equal < max(len(left.first), len(right.first)) else None


def _have_token_ids(*answers: OutputSample) -> bool:
    """Return True if the answers hold token ids.

    Text pieces cannot be compared: each stream splits them differently.
    """
    return all(isinstance(token, int) for answer in answers for token in answer.first)


def _after(equal: int) -> str:
    """Return `after 3 tokens`, as reports write it."""
    return f"after {equal} token{'' if equal == 1 else 's'}"


def _token(answer: OutputSample, at: int) -> str:
    """Return the kept token at an index of an answer as text, or `the end` after its last."""
    return f"token {answer.first[at]}" if at < len(answer.first) else "the end"


def _answer_to(probe: Probe, answers: Sequence[OutputSample]) -> OutputSample | None:
    """Return the first answer of this kind; None if the question was not asked."""
    return next((answer for answer in answers if answer.probe is probe), None)


def _attends_back(answers: Sequence[OutputSample], same: int) -> bool:
    """Return True if the answer changed when the question had another beginning.

    False if one of the two questions was not asked. same: number of first tokens to compare.
    """
    ours, moved = _answer_to(Probe.GREEDY, answers), _answer_to(Probe.BEGINNING, answers)
    return ours is not None and moved is not None and ours.first[:same] != moved.first[:same]
