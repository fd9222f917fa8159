"""Whether an engine that lives says what it should. Pure: tokens in, a sentence about what is wrong with them out.

    output=checks(longest_run=32, distinct=0.1, same=16, baseline="eager")

After its workload each arm is asked the same question, greedily. Some answers are wrong by themselves: one token over and over, a long
prompt that is not remembered. The strong check holds an answer against the baseline arm's: the same weights and the same prompt give the
same first tokens, whatever graphs or caches are in between. Further on they may part, because sums in another order round differently.

Random weights say nothing that could be right: a tiny model of them repeats itself in perfect health. They are not judged by themselves,
and dummy ones not at all. Weights that were made so that each token depends on all before it (`releases.weights`) can be held against the
baseline arm's answer where two things are seen in that arm: it answers otherwise after another beginning of the same text, and where the
answers part its own token was clearly likelier than the next best one, so that no rounding can have decided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

__all__ = [
    "BEGINNING",
    "QUESTION",
    "Checks",
    "Held",
    "Probe",
    "Said",
    "Weights",
    "checks",
    "hold",
    "judge",
    "longest_run",
    "probes",
    "said",
]

QUESTION = (
    "The bicycle was not invented by one person on one day. Its history begins in the early nineteenth century, when"
)
"""Prose, which a model continues without repeating itself; the same for every arm, so that answers can be compared."""

BEGINNING = (
    "The telescope was not invented by one person on one day. Its history begins in the early nineteenth century, when"
)
"""`QUESTION` with another second word: whoever looks that far back continues it otherwise."""

CLEAR = 0.5
"""Nats by which a token must be likelier than the next best one for a difference there to mean something. What another order of sums
in bfloat16 changes is a tenth of that."""

KEPT = 64
"""Tokens of an answer that the journal keeps."""


class Probe(StrEnum):
    """What was asked."""

    GREEDY = "greedy"  # to continue `QUESTION`
    BEGINNING = "beginning"  # the same, after another beginning
    NEEDLE = "needle"  # for a number that stands in the middle of a long prompt


class Weights(StrEnum):
    """What the answers come from."""

    REAL = "real"
    DUMMY = "dummy"  # random numbers
    MADE = "made"  # random numbers of such sizes that each token depends on all before it
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
    none). margins: of these, by how much each was likelier than the next best, in nats; empty where the server does not say. found:
    whether the needle is in it; None where none was hidden."""

    probe: Probe
    length: int
    sha256: str
    first: tuple[int | str, ...]
    longest_run: int
    distinct: float
    found: bool | None = None
    margins: tuple[float, ...] = ()


def probes(wanted: Checks, weights: Weights | None) -> tuple[Probe, ...]:
    """What is asked of such weights, in this order; None for those of which only the log will tell.

    Whether they look back is a question to made ones alone. A number that is lost in a long prompt is no news of random ones.
    """
    found = [Probe.GREEDY]
    if weights is Weights.MADE:
        found.append(Probe.BEGINNING)
    if wanted.needle is not None and weights not in (Weights.DUMMY, Weights.MADE):
        found.append(Probe.NEEDLE)
    return tuple(found)


def longest_run(tokens: Sequence[int | str]) -> int:
    """How often the most repeated token stands in a row; 0 where there is none."""
    return max((sum(1 for _ in run) for _, run in groupby(tokens)), default=0)


def said(
    probe: Probe, tokens: Sequence[int | str], text: str, *, needle: str = "", margins: Sequence[float] = ()
) -> Said:
    """What is kept of an answer. `needle`: the text that it should hold."""
    return Said(
        probe,
        len(tokens),
        hashlib.sha256(text.encode("utf-8", "replace")).hexdigest(),
        tuple(tokens[:KEPT]),
        longest_run(tokens),
        len(set(tokens)) / len(tokens) if tokens else 0.0,
        needle in text if needle else None,
        tuple(round(margin, 3) for margin in margins[:KEPT]),
    )


def judge(wanted: Checks | None, answers: Sequence[Said], weights: Weights | None) -> str | None:
    """What is wrong with the answers of one trial by themselves, as a sentence; None where nothing is, or nobody can say."""
    if wanted is None or weights in (None, Weights.DUMMY, Weights.MADE):
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


@dataclass(frozen=True)
class Held:
    """An answer that was held against the baseline arm's. wrong: how they part. unknown: why nothing follows from either. Sentences, and
    empty where it is not so."""

    wrong: str = ""
    unknown: str = ""


def hold(wanted: Checks, answers: Sequence[Said], baseline: Sequence[Sequence[Said]], weights: Weights | None) -> Held:
    """Holds the greedy answer of one trial against the baseline arm's.

    `baseline`: the answers of each of its trials. Where these differ among themselves the model does not repeat itself, and nothing
    follows from another arm's doing so.
    """
    if wanted.same is None:
        return Held(unknown="nothing is declared that an answer could be held against")
    if weights in (None, Weights.DUMMY):
        return Held(unknown="what dummy weights say is neither right nor wrong")
    ours, theirs = _greedy(answers), [one for one in map(_greedy, baseline) if one is not None]
    if ours is None:
        return Held(unknown="it was not asked the question")
    if not theirs:
        return Held(
            unknown=f"there is no answer of {wanted.baseline} to hold its own against (--arm {wanted.baseline})"
        )
    if len({one.first[: wanted.same] for one in theirs}) != 1:
        return Held(unknown=f"{wanted.baseline} does not repeat its own answer")
    if weights is Weights.MADE and not all(_looks_back(trial, wanted.same) for trial in baseline):
        return Held(unknown=f"{wanted.baseline} answers the same after another beginning, so its answer shows nothing")
    right = theirs[0]
    mine, its = ours.first[: wanted.same], right.first[: wanted.same]
    if mine == its:
        return Held()
    shared = next((i for i, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b), min(len(mine), len(its)))
    parted = f"{shared} token{'' if shared == 1 else 's'}"
    if weights is Weights.MADE and right.margins[shared : shared + 1] < (CLEAR,):
        return Held(unknown=f"they part after {parted}, where {wanted.baseline} had no clear best one")
    return Held(
        f"its greedy answer is not that of {wanted.baseline}: they part after {parted}, and the first {wanted.same} "
        "should be the same"
    )


def _greedy(answers: Sequence[Said]) -> Said | None:
    return next((one for one in answers if one.probe is Probe.GREEDY), None)


def _looks_back(answers: Sequence[Said], same: int) -> bool:
    """Whether another beginning gave another answer."""
    ours, other = _greedy(answers), next((one for one in answers if one.probe is Probe.BEGINNING), None)
    return ours is not None and other is not None and ours.first[:same] != other.first[:same]
