"""Whether an engine that lives says what it should. Pure: tokens in, a sentence about what is wrong with them out.

    output=checks(longest_run=32, distinct=0.1, same=16, baseline="eager")

After its workload each arm is asked the same question, greedily. Some answers are wrong by themselves: one token over and over, a long
prompt that is not remembered. The strong check holds an answer against the baseline arm's: the same weights and the same prompt give the
same first tokens, whatever graphs or caches are in between. Further on they may part, because sums in another order round differently.

Random weights say nothing that could be right: a tiny model of them repeats itself in perfect health. They are not judged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

__all__ = [
    "QUESTION",
    "Checks",
    "Probe",
    "Said",
    "Weights",
    "checks",
    "differs",
    "judge",
    "longest_run",
    "pair",
    "said",
]

QUESTION = (
    "The bicycle was not invented by one person on one day. Its history begins in the early nineteenth century, when"
)
"""Prose, which a model continues without repeating itself; the same for every arm, so that answers can be compared."""

KEPT = 64
"""Tokens of an answer that the journal keeps."""


class Probe(StrEnum):
    """What was asked."""

    GREEDY = "greedy"  # to continue `QUESTION`
    NEEDLE = "needle"  # for a number that stands in the middle of a long prompt


class Weights(StrEnum):
    """What the answers come from."""

    REAL = "real"
    DUMMY = "dummy"  # random numbers
    IMITATED = (
        "imitated"  # a rehearsal: words that are made up, and never one of them over and over unless that was ordered
    )


@dataclass(frozen=True)
class Checks:
    """What a scenario declares. None: not checked.

    longest_run: one token more often than that in a row is wrong. distinct: so many different tokens by all of them, at least.
    same: the first so many tokens are those of `baseline`, an arm. needle: tokens of a prompt in whose middle a number must be found.
    tokens: length of the answer that is asked for.
    """

    longest_run: int | None = None
    distinct: float | None = None
    same: int | None = None
    needle: int | None = None
    baseline: str = ""
    tokens: int = KEPT


def checks(
    *,
    longest_run: int | None = None,
    distinct: float | None = None,
    same: int | None = None,
    needle: int | None = None,
    baseline: str = "",
    tokens: int = KEPT,
) -> Checks:
    """An output check, made in each arm once its engine has lived through the workload; see `Checks`."""
    if longest_run is None and distinct is None and same is None and needle is None:
        raise ValueError("checks() checks something: longest_run=, distinct=, same= or needle=")
    if longest_run is not None and not 1 <= longest_run < tokens:
        raise ValueError(f"longest_run={longest_run} says nothing about an answer of {tokens} tokens")
    if distinct is not None and not 0 < distinct <= 1:
        raise ValueError("distinct is a share: more than 0, at most 1")
    if (same is not None) is not bool(baseline):
        raise ValueError('same=… goes with baseline="…", the arm whose answer it is held against')
    if same is not None and not 1 <= same <= min(tokens, KEPT):
        raise ValueError(f"same={same}: from 1 to {min(tokens, KEPT)} tokens can be compared")
    if needle is not None and needle < 100:
        raise ValueError(f"a needle takes a prompt of 100 tokens or more, not {needle}")
    return Checks(longest_run, distinct, same, needle, baseline, tokens)


@dataclass(frozen=True)
class Said:
    """One answer, as the journal keeps it: sha256 of its text, and its first tokens (ids, or pieces of text where the server gives
    none). found: whether the needle is in it; None where none was hidden."""

    probe: Probe
    length: int
    sha256: str
    first: tuple[int | str, ...]
    longest_run: int
    distinct: float
    found: bool | None = None


def longest_run(tokens: Sequence[int | str]) -> int:
    """How often the most repeated token stands in a row; 0 where there is none."""
    return max((sum(1 for _ in run) for _, run in groupby(tokens)), default=0)


def said(probe: Probe, tokens: Sequence[int | str], text: str, *, needle: str = "") -> Said:
    """What is kept of an answer. `needle`: the text that it should hold."""
    return Said(
        probe,
        len(tokens),
        hashlib.sha256(text.encode("utf-8", "replace")).hexdigest(),
        tuple(tokens[:KEPT]),
        longest_run(tokens),
        len(set(tokens)) / len(tokens) if tokens else 0.0,
        needle in text if needle else None,
    )


def judge(wanted: Checks | None, answers: Sequence[Said], weights: Weights | None) -> str | None:
    """What is wrong with the answers of one trial by themselves, as a sentence; None where nothing is, or nobody can say."""
    if wanted is None or weights in (None, Weights.DUMMY):
        return None
    for answer in answers:
        if answer.probe is Probe.NEEDLE:
            if answer.found is False and weights is Weights.REAL:
                return f"the number in the middle of {wanted.needle:,} tokens was not found again"
            continue
        if wanted.longest_run is not None and answer.longest_run > wanted.longest_run:
            return f"one token {answer.longest_run} times in a row, in an answer of {answer.length}"
        if wanted.distinct is not None and answer.distinct < wanted.distinct:
            different = round(answer.distinct * answer.length)
            return f"only {different} different tokens in an answer of {answer.length}"
    return None


Tokens = tuple[int | str, ...]


def pair(wanted: Checks, answers: Sequence[Said], baseline: Sequence[Sequence[Said]]) -> tuple[Tokens, Tokens] | None:
    """The first tokens of one trial's greedy answer and those that they are held against; None where nobody can say.

    `baseline`: the answers of each of the baseline arm's trials. Where these differ among themselves the model does not repeat itself, and
    nothing follows from another arm's doing so.
    """
    if wanted.same is None:
        return None
    theirs = {one.first[: wanted.same] for trial in baseline for one in trial if one.probe is Probe.GREEDY}
    ours = next((one.first[: wanted.same] for one in answers if one.probe is Probe.GREEDY), None)
    if ours is None or len(theirs) != 1:
        return None
    return ours, theirs.pop()


def differs(wanted: Checks, answers: Sequence[Said], baseline: Sequence[Sequence[Said]]) -> str | None:
    """How the greedy answer of one trial parts from the baseline arm's, as a sentence; None where it does not, or nobody can say."""
    held = pair(wanted, answers, baseline)
    if held is None or held[0] == held[1]:
        return None
    ours, right = held
    shared = next((i for i, (a, b) in enumerate(zip(ours, right, strict=False)) if a != b), min(len(ours), len(right)))
    return (
        f"its greedy answer is not that of {wanted.baseline}: they part after {shared} tokens, and the first {wanted.same} "
        "should be the same"
    )
