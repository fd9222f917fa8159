"""Bisection over candidates that cannot all be tried and die in some boots only: a noisy binary search. Pure.

Candidates are numbered from the good end, 0, to the bad end. The change point is the first bad one. Errors are one-sided: a death proves a
candidate bad, and with it all behind it; a clean boot is evidence of good, by the chance that a bad candidate survives one boot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate
from math import ceil, isclose, log2

__all__ = ["UNLIKELY", "Answer", "Conclusion", "Probe", "Search", "State", "information"]

_WRONG_END = 0.1
"""Prior chance that the good end is bad, and that the bad end is good."""

UNLIKELY = 0.1
"""Weight of a change point that something else than boots speaks against. At 95 % confidence only boots rule it out."""


class Answer(StrEnum):
    """Result of one boot of a candidate."""

    GOOD = "good"
    BAD = "bad"
    SKIP = "skip"


@dataclass(frozen=True)
class Probe:
    """One boot of a candidate."""

    candidate: int
    answer: Answer


class State(StrEnum):
    """How far a search is."""

    OPEN = "open"
    FOUND = "found"
    STUCK = "stuck"  # only candidates that were skipped could tell the rest apart
    GOOD_END_WRONG = "good-end-wrong"
    BAD_END_WRONG = "bad-end-wrong"

    @property
    def wrong_end(self) -> bool:
        return self in (State.GOOD_END_WRONG, State.BAD_END_WRONG)


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """Answer of a search so far.

    left: the change points that are left, in order, the most probable ones that together reach the confidence. probability: theirs.
    good_again: candidates behind a bad one that are good with that confidence, so there is more than one change.
    """

    state: State
    left: tuple[int, ...]
    probability: float
    good_again: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Search:
    """A bisection of `size` candidates. It is a value: the same probes give the same search.

    rate: the chance that a bad candidate dies in one boot. confidence: at which the search ends. weights: how likely each change point from
    1 to `size` - 1 is before the first boot; none if all are alike. chances: how likely each candidate gives an answer, by what is known of
    it beside its neighbours; none if nothing is. One with chance 0 counts as a skip without a boot, unless it is an end.
    """

    size: int
    rate: float = 1.0
    confidence: float = 0.95
    weights: tuple[float, ...] = ()
    chances: tuple[float, ...] = ()
    probes: tuple[Probe, ...] = ()

    def __post_init__(self) -> None:
        if self.size < 2 or not 0 < self.rate <= 1 or not 0 < self.confidence < 1:
            raise ValueError(f"no search: {self.size} candidates, rate {self.rate}, confidence {self.confidence}")
        if self.weights and len(self.weights) != self.size - 1:
            raise ValueError(f"no search: {len(self.weights)} weights of {self.size - 1} change points")
        if self.chances and len(self.chances) != self.size:
            raise ValueError(f"no search: {len(self.chances)} chances of {self.size} candidates")

    def after(self, candidate: int, answer: Answer) -> Search:
        """Return the search with one more boot."""
        if not 0 <= candidate < self.size:
            raise ValueError(f"no candidate {candidate} of {self.size}")
        return replace(self, probes=(*self.probes, Probe(candidate, answer)))

    def count(self, answer: Answer) -> Counter[int]:
        """Return the number of boots with this answer, by candidate."""
        return Counter(probe.candidate for probe in self.probes if probe.answer is answer)

    def posterior(self) -> list[float]:
        """Return the probability of each change point, from 0 (the good end is bad) to `size` (the bad end is good)."""
        good, first_death = self.count(Answer.GOOD), min(self.count(Answer.BAD), default=self.size)
        inner = self.weights or (1.0,) * (self.size - 1)
        share = (1 - 2 * _WRONG_END) / sum(inner)
        weights = [_WRONG_END, *(share * weight for weight in inner), _WRONG_END]
        weights[first_death + 1 :] = [0.0] * (self.size - first_death)
        survives = 1.0
        # Clean boots behind the first death have the same chance for every change point left, so they do not count.
        for point in range(first_death - 1, -1, -1):
            if good[point]:
                survives *= (1 - self.rate) ** good[point]
            weights[point] *= survives
        total = sum(weights)
        return [weight / total for weight in weights]

    def conclusion(self) -> Conclusion:
        """Return what is known by now."""
        return self._conclusion(self.posterior())

    def _conclusion(self, posterior: Sequence[float]) -> Conclusion:
        left: list[int] = []
        together = 0.0
        for point in sorted(range(self.size + 1), key=posterior.__getitem__, reverse=True):
            enough = together >= self.confidence
            if not posterior[point] or (enough and not isclose(posterior[point], posterior[left[-1]])):
                break  # of points that are equally probable, all are left or none
            left.append(point)
            together += posterior[point]
        left.sort()
        return Conclusion(
            state=self._state(left),
            left=tuple(left),
            probability=min(1.0, together),
            good_again=self._good_again(),
        )

    def _state(self, left: Sequence[int]) -> State:
        good, bad, skipped = map(self.count, (Answer.GOOD, Answer.BAD, Answer.SKIP))
        if left == [self.size] or (skipped[self.size - 1] and not bad):
            return State.BAD_END_WRONG
        if bad[0] or (skipped[0] and not good[0]):
            return State.GOOD_END_WRONG
        if not bad or not good[0]:
            return State.OPEN  # an end is not checked yet
        if len(left) == 1 and left[0]:
            return State.FOUND
        return State.OPEN if any(not skipped[one] and self._chance(one) for one in _between(left)) else State.STUCK

    def _chance(self, candidate: int) -> float:
        return self.chances[candidate] if self.chances else 1.0

    def _good_again(self) -> tuple[int, ...]:
        good, bad = self.count(Answer.GOOD), self.count(Answer.BAD)
        first_death = min(bad, default=self.size)
        return tuple(
            candidate
            for candidate in sorted(good)
            if candidate > first_death
            and not bad[candidate]
            and (1 - self.rate) ** good[candidate] <= 1 - self.confidence
        )

    def choose(self, cost: Callable[[int], float] = lambda _: 1.0) -> int | None:
        """Return the candidate to boot next, None if the search is over: first both ends, then the most information for its cost.

        cost: of one boot of a candidate, in any unit.
        """
        posterior = self.posterior()
        known = self._conclusion(posterior)
        if known.state is not State.OPEN:
            return None
        if not self.count(Answer.BAD):
            return self.size - 1
        if not self.count(Answer.GOOD)[0]:
            return 0
        refused = self.count(Answer.SKIP)
        skipped = sorted(one for one in refused if self._chance(one))  # others failed for a reason of their own
        near = sum(known.left[0] <= one <= known.left[-1] for one in skipped)

        def value(candidate: int) -> float:
            bits = information(min(bad[candidate], 1.0), self.rate)
            return bits * self._chance(candidate) * _bootable(candidate, skipped, near) / cost(candidate)

        bad = list(accumulate(posterior))
        return max((one for one in _between(known.left) if not refused[one] and self._chance(one)), key=value)

    def ahead(self, most: int, cost: Callable[[int], float] = lambda _: 1.0) -> tuple[int, ...]:
        """Return up to `most` candidates to boot at once: the next one, then those that would follow a death or a clean boot."""
        chosen: dict[int, None] = {}
        states = deque([self])
        while states and len(states) <= 2 * most and len(chosen) < most:
            search = states.popleft()
            if (candidate := search.choose(cost)) is not None:
                chosen[candidate] = None
                states += (search.after(candidate, answer) for answer in (Answer.BAD, Answer.GOOD))
        return tuple(chosen)

    def boots_left(self) -> int:
        """Return about how many boots are to come, without skips."""
        posterior = self.posterior()
        if self._conclusion(posterior).state is not State.OPEN:
            return 0
        unknown = -sum(chance * log2(chance) for chance in posterior if chance > 0)
        return max(1, ceil(unknown / max(information(step / 100, self.rate) for step in range(1, 101))))


def _between(left: Sequence[int]) -> range:
    """Return the candidates of which a boot tells change points apart."""
    return range(left[0], left[-1] or 1)


def information(bad: float, rate: float) -> float:
    """Return the bits that one boot gives about the change point. bad: the probability that the candidate is bad."""
    return _entropy(rate * bad) - bad * _entropy(rate)


def _entropy(chance: float) -> float:
    return -sum(part * log2(part) for part in (chance, 1 - chance) if part > 0)


def _bootable(candidate: int, skipped: Sequence[int], near: int) -> float:
    """Return the chance that a candidate boots: less the nearer it is to a skipped one, and the more of these there are.

    skipped: sorted. near: how many of them lie among the change points left.
    """
    place = bisect_left(skipped, candidate)
    around = skipped[max(0, place - 1) : place + 1]
    distance = min((abs(candidate - one) for one in around), default=1)
    return distance / (distance + near)
