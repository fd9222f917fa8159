"""Search of a guilty component in made histories, against a search that knows the component."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro_search.bisect.component_plan import Cause, Combination, ComponentPlan
from vllm_repro_search.bisect.plan import BisectionPlan, BootResult, ChangePlan, Place, Side
from vllm_repro_search.plan import SearchState

Boot = Callable[[Combination], Side]


def boots(plan: ChangePlan[Place], boot: Callable[[Place], Side]) -> list[BootResult[Place]]:
    """Return the boots that the plan asks for until it is over."""
    results: list[BootResult[Place]] = []
    while (place := plan.next()) is not None:
        results.append(BootResult(place, boot(place)))
        plan = plan.after(results[-1])
        assert len(results) < 150, "the search does not end"
    return results


def searched(sizes: Combination, boot: Boot, rate: float = 1.0) -> ComponentPlan:
    plan = ComponentPlan(sizes=sizes, rate=rate)
    return plan.after(*boots(plan, boot))


def by(cause: Cause, rate: float = 1.0, random: Random | None = None) -> Boot:
    """Return boots that fail by a cause, in a share of them."""

    def boot(combination: Combination) -> Side:
        fails = cause.fails(combination) and (random is None or random.random() < rate)
        return Side.BAD if fails else Side.GOOD

    return boot


@pytest.mark.parametrize(
    ("rate", "number", "most", "right"), [(1.0, 40, 1.3, 40), (0.5, 15, 1.4, 13)]
)
def test_a_guilty_component_takes_few_more_boots_than_a_known_one(
    rate: float, number: int, most: float, right: int
) -> None:
    """All components are right; of a flaky bug, the version in 95 % of the searches."""
    random, noise, ours, known, exact = Random(1), Random(2), 0, 0, 0
    for _ in range(number):
        sizes = tuple(random.randint(12, 24) for _ in range(random.randint(2, 4)))
        guilty = random.randrange(len(sizes))
        first = random.randint(1, sizes[guilty] - 1)
        cause = Cause(True, ((guilty, first),))
        done = searched(sizes, by(cause, rate, noise), rate)
        answer = done.answer()
        assert (answer.state, answer.left[0].together) == (SearchState.FOUND, True)
        assert [place for place, _ in answer.left[0].firsts] == [guilty]
        exact += answer.left[0] == cause
        ours += len(done.results)
        single = BisectionPlan(size=sizes[guilty], rate=rate)

        def alone(place: int, cause: Cause = cause, guilty: int = guilty) -> Side:
            return by(cause, rate, noise)((*(0,) * guilty, place))

        known += len(boots(single, alone))
    assert exact >= right
    assert ours <= most * known, f"{ours} boots, {known} with a known component"


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Combination, tuple[tuple[int, int], ...]]:
    sizes = tuple(draw(st.lists(st.integers(2, 7), min_size=2, max_size=4)))
    places = draw(st.permutations(range(len(sizes))))[:2]
    return sizes, tuple((place, draw(st.integers(1, sizes[place] - 1))) for place in sorted(places))


@given(pairs(), st.sampled_from([1, 2]))
def test_one_or_two_together_are_named_with_their_versions(
    case: tuple[Combination, tuple[tuple[int, int], ...]], number: int
) -> None:
    sizes, firsts = case
    cause = Cause(True, firsts[:number])
    done = searched(sizes, by(cause))
    known = done.answer()
    assert (known.state, known.left[0]) == (SearchState.FOUND, cause)
    booted = [boot.candidate for boot in done.results]
    assert booted[:2] == [done.ends[1], done.ends[0]]
    assert len(booted) == len(set(booted)), "no combination twice: each answer is certain"
    assert len(done.ahead(3)) == done.boots_left() == 0


@given(pairs())
def test_one_of_several_that_are_enough_is_never_called_the_only_one(
    case: tuple[Combination, tuple[tuple[int, int], ...]],
) -> None:
    sizes, firsts = case
    known = searched(sizes, by(Cause(False, firsts))).answer()
    (place, _), *more = known.left[0].firsts
    assert known.state is SearchState.FOUND
    assert {place, *(other for other, _ in more), *known.untested} >= {one for one, _ in firsts}


def test_two_flaky_ones_together_are_named() -> None:
    cause = Cause(True, ((0, 3), (2, 5)))
    known = searched((6, 5, 8), by(cause, 0.6, Random(4)), 0.6).answer()
    assert (known.state, known.left[0]) == (SearchState.FOUND, cause)


@pytest.mark.parametrize("rate", [1.0, 0.6])
def test_three_together_and_a_good_version_behind_a_bad_one_are_a_surprise(rate: float) -> None:
    three = Cause(True, ((0, 2), (1, 3), (2, 2)))
    random = Random(1)
    assert searched((4, 5, 6), by(three, rate, random), rate).state is SearchState.SURPRISE
    odd: dict[Combination, Side] = {
        (0, 1): Side.BAD,
        (1, 0): Side.BAD,
        (1, 1): Side.GOOD,
        (2, 2): Side.BAD,
    }
    plan = ComponentPlan(sizes=(3, 3)).after(*(BootResult(*boot) for boot in odd.items()))
    assert plan.after(BootResult((0, 0), Side.GOOD)).state is SearchState.SURPRISE


def test_combinations_that_do_not_boot_are_passed_over() -> None:
    cause = Cause(True, ((1, 3),))

    def boot(combination: Combination) -> Side:
        return Side.SKIP if combination[0] == 2 and combination[1] < 5 else by(cause)(combination)

    answer = searched((5, 6), boot).answer()
    assert (answer.state, answer.left[0]) == (SearchState.FOUND, cause)
    ends = ((0, 0), (4, 5))
    stuck = searched((5, 6), lambda place: by(cause)(place) if place in ends else Side.SKIP)
    assert (stuck.state, stuck.next()) == (SearchState.STUCK, None)


def test_good_versions_that_die_at_times_are_born_red() -> None:
    boots: list[tuple[Combination, Side]] = [
        ((2, 2), Side.BAD),
        ((0, 0), Side.GOOD),
        ((0, 0), Side.BAD),
    ]
    plan = ComponentPlan(sizes=(3, 3), rate=0.5).after(*(BootResult(*boot) for boot in boots))
    assert plan.state is SearchState.GOOD_END_WRONG


@pytest.mark.parametrize("rate", [1.0, 0.5])
def test_three_that_are_each_enough_are_a_surprise(rate: float) -> None:
    bad: list[Combination] = [(2, 2, 2), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    good: list[Combination] = [(0, 0, 0)] * 8
    plan = ComponentPlan(sizes=(3, 3, 3), rate=rate).after(
        *(BootResult(boot, Side.BAD) for boot in bad),
        *(BootResult(boot, Side.GOOD) for boot in good),
    )
    assert plan.state is SearchState.SURPRISE
