"""Bisection as a noisy binary search: candidates may not boot, or die in some boots only. Pure.

Candidates are numbered from the good end, 0, to the bad end. The change point is the first bad one.
Errors are one-sided: a death proves a candidate bad, and with it all behind it; a clean boot is
evidence of good, by the chance that a bad candidate survives one boot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from math import ceil, isclose, log2
from typing import Generic, NamedTuple, Self, TypeVar

from vllm_repro_search.plan import SearchState

Place = TypeVar("Place")

WRONG_END = 0.1
"""Prior chance, for each end of the range, that its declared result is wrong."""


class Side(StrEnum):
    """The side of the change on which one boot puts a candidate; `skip` if it decides nothing."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"


class BootResult(NamedTuple, Generic[Place]):
    """Result of one boot: the candidate's number, and the side of the change that it showed."""

    candidate: Place
    side: Side


class ChangePlan(ABC, Generic[Place]):
    """Plan of a search for a change, by boots that each rule out some of what may have changed."""

    # chance that a bad candidate dies in one boot
    rate: float

    @abstractmethod
    def after(self, *results: BootResult[Place]) -> Self:
        """Return the plan after more boots."""

    @abstractmethod
    def next(self, cost: Callable[[Place], float] = lambda _: 1.0) -> Place | None:
        """Return the candidate to boot next; None if the search is over."""

    @abstractmethod
    def posterior(self) -> list[float]:
        """Return the probability of each change that is possible."""

    @property
    @abstractmethod
    def state(self) -> SearchState:
        """Return whether the search is open, has an answer, or cannot get one."""

    def ahead(self, most: int, cost: Callable[[Place], float] = lambda _: 1.0) -> tuple[Place, ...]:
        """Return up to `most` candidates to boot at once.

        The next one is first, then those that would follow a death or a clean boot; empty if the
        search is over. cost: as of `next`.
        """
        chosen: dict[Place, None] = {}
        plans: deque[ChangePlan[Place]] = deque([self])
        while plans and len(plans) <= 2 * most and len(chosen) < most:
            plan = plans.popleft()
            if (candidate := plan.next(cost)) is not None:
                chosen[candidate] = None
                plans += (plan.after(BootResult(candidate, side)) for side in (Side.BAD, Side.GOOD))
        return tuple(chosen)

    def boots_left(self) -> int:
        """Return about how many boots are to come if none is skipped; 0 if the search is over."""
        if self.state is not SearchState.OPEN:
            return 0
        unknown = -sum(chance * log2(chance) for chance in self.posterior() if chance > 0)
        return max(
            1, ceil(unknown / max(information(step / 100, self.rate) for step in range(1, 101)))
        )


@dataclass(frozen=True, kw_only=True)
class ChangePoints:
    """Candidates that may be the first bad one, the change point, after the boots so far."""

    state: SearchState
    # the most probable change points that together reach the confidence, in order
    left: tuple[int, ...]
    # of those in `left`, together
    probability: float
    # candidates behind a bad one that are good with that confidence: there is more than one change
    good_again: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BisectionPlan(ChangePlan[int]):
    """Plan of a bisection of `size` candidates, at least two: the answer and the next boot."""

    size: int
    # chance that a bad candidate dies in one boot
    rate: float = 1.0
    # probability of the answer at which the search ends
    confidence: float = 0.95
    results: tuple[BootResult[int], ...] = ()

    def after(self, *results: BootResult[int]) -> Self:
        """Return the plan after more boots."""
        return replace(self, results=(*self.results, *results))

    def count(self, side: Side) -> Counter[int]:
        """Return the number of boots with this result, by candidate."""
        return Counter(result.candidate for result in self.results if result.side is side)

    def posterior(self) -> list[float]:
        """Return the probability of each candidate to be the first bad one, and of none to be bad.

        Index 0: the good end is bad. Index `size`: the bad end is good.
        """
        good, first_death = self.count(Side.GOOD), min(self.count(Side.BAD), default=self.size)
        share = (1 - 2 * WRONG_END) / (self.size - 1)
        weights = [WRONG_END, *[share] * (self.size - 1), WRONG_END]
        weights[first_death + 1 :] = [0.0] * (self.size - first_death)
        survives = 1.0
        # Clean boots behind the first death have the same chance for every change point left, so
        # they do not count.
        for point in range(first_death - 1, -1, -1):
            if good[point]:
                survives *= (1 - self.rate) ** good[point]
            weights[point] *= survives
        total = sum(weights)
        return [weight / total for weight in weights]

    @property
    def state(self) -> SearchState:
        """Return whether the search is open, has an answer, or cannot get one."""
        return self.answer().state

    def answer(self) -> ChangePoints:
        """Return where the change may be, by the boots so far."""
        posterior = self.posterior()
        left: list[int] = []
        together = 0.0
        for point in sorted(range(self.size + 1), key=posterior.__getitem__, reverse=True):
            enough = together >= self.confidence
            if not posterior[point] or (
                enough and not isclose(posterior[point], posterior[left[-1]])
            ):
                break  # of points that are equally probable, all are left or none
            left.append(point)
            together += posterior[point]
        left.sort()
        return ChangePoints(
            state=self._state(left),
            left=tuple(left),
            probability=min(1.0, together),
            good_again=self._good_again(),
        )

    def _state(self, left: Sequence[int]) -> SearchState:
        """Return the state of the search. left: candidates that may be the first bad one."""
        good, bad, skipped = map(self.count, (Side.GOOD, Side.BAD, Side.SKIP))
        if left == [self.size] or (skipped[self.size - 1] and not bad):
            return SearchState.BAD_END_WRONG
        if bad[0] or (skipped[0] and not good[0]):
            return SearchState.GOOD_END_WRONG
        if not bad or not good[0]:
            return SearchState.OPEN  # an end is not checked yet
        if len(left) == 1 and left[0]:
            return SearchState.FOUND
        return (
            SearchState.OPEN
            if any(not skipped[place] for place in _between(left))
            else SearchState.STUCK
        )

    def _good_again(self) -> tuple[int, ...]:
        """Return the candidates behind a bad one that are good: there is a second change."""
        good, bad = self.count(Side.GOOD), self.count(Side.BAD)
        first_death = min(bad, default=self.size)
        return tuple(
            candidate
            for candidate in sorted(good)
            if candidate > first_death
            and not bad[candidate]
            and (1 - self.rate) ** good[candidate] <= 1 - self.confidence
        )

    def next(self, cost: Callable[[int], float] = lambda _: 1.0) -> int | None:
        """Return the candidate to boot next; None if the search is over.

        Both ends come first, then the most information for its cost. cost: of one boot of a
        candidate, in any unit.
        """
        known = self.answer()
        if known.state is not SearchState.OPEN:
            return None
        if not self.count(Side.BAD):
            return self.size - 1
        if not self.count(Side.GOOD)[0]:
            return 0
        skipped = sorted(self.count(Side.SKIP))
        near = sum(known.left[0] <= place <= known.left[-1] for place in skipped)

        def value(candidate: int) -> float:
            bits = information(bad[candidate], self.rate)
            return bits * _bootable(candidate, skipped, near) / cost(candidate)

        bad = list(accumulate(self.posterior()))
        return max((place for place in _between(known.left) if place not in skipped), key=value)


def _between(left: Sequence[int]) -> range:
    """Return the candidates whose boot can narrow down `left`: those that may be good or bad.

    left: candidates that may be the first bad one, in order.
    """
    return range(left[0], left[-1] or 1)


def information(bad: float, rate: float) -> float:
    """Return the bits that one boot gives about the change point.

    That is the entropy of its death, less what is left of it once the candidate is known to be bad;
    a good one never dies.

    bad: the probability that the candidate is bad. rate: the chance that a bad candidate dies in
    one boot.
    """
    return _entropy(rate * bad) - bad * _entropy(rate)


def _entropy(chance: float) -> float:
    """Return the entropy, in bits, of an event with this probability."""
    return -sum(part * log2(part) for part in (chance, 1 - chance) if part > 0)


def _bootable(candidate: int, skipped: Sequence[int], near: int) -> float:
    """Return the chance that a candidate boots.

    It is smaller near skipped candidates, and the more of them are near. skipped: all of them,
    sorted. near: how many of them are among the candidates that may be the first bad one.
    """
    place = bisect_left(skipped, candidate)
    around = skipped[max(0, place - 1) : place + 1]
    distance = min((abs(candidate - skip) for skip in around), default=1)
    return distance / (distance + near)
