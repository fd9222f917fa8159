"""Bisection over several components at once: which of them brought the bug, and since when. Pure.

The versions of a component are numbered from its good end, 0, to its bad end. A combination has a
version of each component. A cause is one component since a version, two that fail only together, or
either of two alone. A boot rules causes out, by the one-sided errors of `plan`; the next boot is
the combination with the most information.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, combinations, product
from typing import NamedTuple

from vllm_repro_search.bisect.plan import WRONG_END, BootResult, ChangePlan, Side, information
from vllm_repro_search.plan import SearchState

Combination = tuple[int, ...]
"""The number of a version for each component."""

_TOGETHER, _EITHER, _MORE = 0.04, 0.03, 0.01
"""Prior chances, relative to one guilty component: both of two, either of two, more than two."""

_OF_KIND = 0.1
"""Weight of the information about the number of components, relative to that about the cause."""

_NOTHING = 1e-9
"""Chances and bits below this are rounding errors."""


class Cause(NamedTuple):
    """Why combinations fail: all these components have a bad version (`together`), or any has.

    More than two stand for any three or more that fail together, since versions that are unknown.
    """

    together: bool
    # component, and its first bad version
    firsts: tuple[tuple[int, int], ...]

    def beside(self, cause: Cause) -> set[int]:
        """Return the components that `cause` lacks; empty if this one does not contain it."""
        firsts, part = dict(self.firsts), dict(cause.firsts)
        return firsts.keys() - part.keys() if part and part.items() <= firsts.items() else set()

    def fails(self, combination: Combination) -> bool:
        """Return True if the combination has the bug by this cause."""
        met = 0  # in a loop: plans ask this a million times
        for component, first in self.firsts:
            met += combination[component] >= first
        return met >= (min(3, len(self.firsts)) if self.together else 1)


ALWAYS, NEVER = Cause(True, ()), Cause(False, ())
"""All combinations fail, or none does."""


@dataclass(frozen=True, kw_only=True)
class ComponentAnswer:
    """Answer of the boots so far: the cause, or the causes that are left."""

    state: SearchState
    # the most probable causes that together reach the confidence, the first one foremost
    left: tuple[Cause, ...]
    # that `left[0]` is right, alone or beside another component that is enough too; without an
    # answer, that one of `left` is
    probability: float
    # components that may be enough alone too
    untested: tuple[int, ...] = ()
    # as in `ChangePoints`: boots that contradict each other are a surprise instead
    good_again: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ComponentPlan(ChangePlan[Combination]):
    """Plan of a search for the cause among `components`: the answer and the next boot."""

    # versions of each component; one that has a single version is never the cause
    sizes: Combination
    # chance that a bad combination dies in one boot
    rate: float = 1.0
    # probability of the answer at which the search ends
    confidence: float = 0.95
    results: tuple[BootResult[Combination], ...] = ()
    # of the causes that are not ruled out; empty if the boots contradict each other
    chances: Mapping[Cause, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.results:
            object.__setattr__(self, "chances", _prior(self.sizes))

    def after(self, *results: BootResult[Combination]) -> ComponentPlan:
        """Return the plan after more boots."""
        chances = self.chances
        for combination, side in results:
            if side is not Side.SKIP:
                # by whether the cause makes this combination fail
                likely = (0.0, self.rate) if side is Side.BAD else (1.0, 1 - self.rate)
                likelihoods = {
                    cause: likely[cause.fails(combination)]
                    for cause in chances
                    # More than two may be bad since any version: such a boot tells nothing of it.
                    if len(cause.firsts) < 3 or sum(map(bool, combination)) < 3
                }
                evidence = sum(chances[cause] * part for cause, part in likelihoods.items())
                # of causes that the boot tells nothing of, so that they keep their share
                mean = evidence / (sum(chances[cause] for cause in likelihoods) or 1.0)
                weights = {
                    cause: chances[cause] * likelihoods.get(cause, mean) for cause in chances
                }
                total = sum(weights.values())
                chances = {cause: weight / total for cause, weight in weights.items() if weight}
        return replace(self, results=(*self.results, *results), chances=chances)

    def posterior(self) -> list[float]:
        """Return the probability of each cause that is not ruled out."""
        return list(self.chances.values())

    @property
    def ends(self) -> tuple[Combination, Combination]:
        """Return the combination of all good versions, and that of all bad ones."""
        return (0,) * len(self.sizes), tuple(size - 1 for size in self.sizes)

    @property
    def state(self) -> SearchState:
        """Return whether the search is open, has an answer, or cannot get one."""
        return self.answer().state

    def answer(self) -> ComponentAnswer:
        """Return the cause, or the causes that are left, by the boots so far."""
        left: list[Cause] = []
        together = 0.0
        for cause in sorted(self.chances, key=self.chances.__getitem__, reverse=True):
            if together >= self.confidence - _NOTHING:
                break
            left.append(cause)
            together += self.chances[cause]
        # The most probable cause is right also if another component beside it is enough alone.
        either = [cause for cause in self.chances if not cause.together and cause.beside(self._top)]
        probability = sum(self.chances[cause] for cause in (*left[:1], *either))
        state = self._state(probability)
        return ComponentAnswer(
            state=state,
            left=tuple(left),
            probability=min(1.0, probability if state is SearchState.FOUND else together),
            untested=tuple(
                sorted({place for cause in either for place in cause.beside(self._top)})
            ),
        )

    @cached_property
    def _top(self) -> Cause:
        """Return the most probable cause."""
        return max(self.chances, key=self.chances.__getitem__, default=NEVER)

    @property
    def _shown(self) -> bool:
        """Return True if a boot died in which only components of the most probable cause are bad.

        Nothing else proves that it needs no other. Two that are enough alone need no such proof.
        """
        innocent = set(range(len(self.sizes))) - {component for component, _ in self._top.firsts}
        return not self._top.together or any(
            side is Side.BAD and not any(boot[component] for component in innocent)
            for boot, side in self.results
        )

    def _state(self, probability: float) -> SearchState:
        """Return the state of the search. probability: that of the most probable cause."""
        sides = {
            side: {boot.candidate for boot in self.results if boot.side is side} for side in Side
        }
        (good_end, bad_end), sure = self.ends, probability >= self.confidence - _NOTHING
        if not sides[Side.BAD]:
            wrong = bad_end in sides[Side.SKIP] or (sure and self._top == NEVER)
            return SearchState.BAD_END_WRONG if wrong else SearchState.OPEN
        if good_end in sides[Side.BAD]:
            return SearchState.GOOD_END_WRONG
        if good_end not in sides[Side.GOOD]:
            return SearchState.GOOD_END_WRONG if good_end in sides[Side.SKIP] else SearchState.OPEN
        clean = self.results.count(BootResult(good_end, Side.GOOD))
        red = sure and self._top == ALWAYS and (1 - self.rate) ** clean <= 1 - self.confidence
        if not self.chances or red or (sure and len(self._top.firsts) > 2):
            return SearchState.SURPRISE
        if sure and self._shown:
            return SearchState.FOUND
        return SearchState.OPEN if self._worth else SearchState.STUCK

    def next(self, cost: Callable[[Combination], float] = lambda _: 1.0) -> Combination | None:
        """Return the combination to boot next; None if the search is over.

        Both ends come first, then what tells most for its cost. cost: of one boot, in any unit.
        """
        if self.state is not SearchState.OPEN:
            return None
        sides = {side for _, side in self.results}
        if Side.BAD not in sides:
            return self.ends[1]
        if BootResult(self.ends[0], Side.GOOD) not in self.results:
            return self.ends[0]
        return max(self._worth, key=lambda boot: self._worth[boot] / cost(boot))

    @cached_property
    def _worth(self) -> dict[Combination, float]:
        """Return what a boot of each combination tells, in bits; those of no use are left out.

        Once a cause is probable, its components are booted without another bad one.
        """
        skipped = [boot.candidate for boot in self.results if boot.side is Side.SKIP]
        guilty = dict(self._top.firsts)
        alone = tuple(last * (place in guilty) for place, last in enumerate(self.ends[1]))
        if self.chances[self._top] >= self.confidence and not self._shown and alone not in skipped:
            return {alone: 1.0}
        by_number = [0.0] * (len(self.sizes) + 2)
        for cause, chance in self.chances.items():
            by_number[len(cause.firsts)] += chance
        several, worth = by_number[2], {}
        for boot, (one, more) in self._failing().items():
            # the chance of the causes that the boot tells of
            judged = 1 - sum(by_number[3:]) if sum(map(bool, boot)) > 2 else 1.0
            bits = judged * information((one + more) / judged, self.rate)
            if _NOTHING < several < judged - _NOTHING:
                within = several * information(more / several, self.rate)
                within += (judged - several) * information(one / (judged - several), self.rate)
                bits += _OF_KIND * (bits - within) / information(several, 1.0)
            if bits > _NOTHING and boot not in skipped:
                near = sum(_differing(boot, skip) < 2 for skip in skipped)
                worth[boot] = bits / (1 + near)
        return worth

    def _failing(self) -> dict[Combination, tuple[float, float]]:
        """Return the probability that a combination is bad, by one component and by several.

        Only combinations in which all but one component are at an end.
        """
        chances: dict[Combination, tuple[float, float]] = {}
        for component, size in enumerate(self.sizes):
            # the chance of all causes that differ only in the first bad versions of the others, by:
            # together or either, first bad version of this one, the others, whether there are any
            alike: defaultdict[tuple[bool, int, tuple[int, ...], bool], float] = defaultdict(float)
            for cause, chance in self.chances.items():
                firsts = dict(cause.firsts)
                first = firsts.pop(component, 0)
                if len(cause.firsts) < 3:  # of more, the versions are unknown
                    alike[cause.together, first, tuple(firsts), len(cause.firsts) > 1] += chance
            ends = [
                (0,) if place == component else {0, last} for place, last in enumerate(self.ends[1])
            ]
            for rest in product(*ends):
                # by the version of the component from which on the combination is bad
                added = [[0.0] * (size + 1) for _ in range(2)]
                for (together, first, others, many), chance in alike.items():
                    met = [rest[other] > 0 for other in others]
                    either = 0 if any(met) else first or size
                    start = (first if all(met) else size) if together else either
                    added[many][start] += chance
                sums = zip(*map(accumulate, added), strict=True)
                for version, (one, more) in zip(range(size), sums, strict=False):
                    chances[*rest[:component], version, *rest[component + 1 :]] = one, more
        return chances


def _differing(first: Combination, second: Combination) -> int:
    """Return in how many components two combinations differ."""
    return sum(one != other for one, other in zip(first, second, strict=True))


def _prior(sizes: Combination) -> dict[Cause, float]:
    """Return the chance of each cause before the first boot. Components are equally likely."""
    moving = [component for component, size in enumerate(sizes) if size > 1]
    pairs = [*combinations(moving, 2)]
    more = [Cause(True, tuple((component, 1) for component in moving))]
    groups = [
        (WRONG_END, [[ALWAYS]]),
        (WRONG_END, [[NEVER]]),
        (_TOGETHER, [_causes(sizes, pair, True) for pair in pairs]),
        (_EITHER, [_causes(sizes, pair, False) for pair in pairs]),
        (_MORE, [more] if len(moving) > 2 else []),
        (1.0, [_causes(sizes, [component], True) for component in moving]),
    ]
    return {
        cause: weight / len(group) / len(causes)
        for weight, group in groups
        for causes in group
        for cause in causes
    }


def _causes(sizes: Combination, components: Sequence[int], together: bool) -> list[Cause]:
    """Return a cause for each choice of a first bad version of each of these components.

    sizes: the number of versions of every component. together: as in `Cause`.
    """
    versions = product(*(range(1, sizes[component]) for component in components))
    return [Cause(together, tuple(zip(components, firsts, strict=True))) for firsts in versions]
