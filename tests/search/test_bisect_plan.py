"""Search of a bisection, with random skips, flaky crashes and several changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, log2
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro_search.bisect.plan import BisectionPlan, BootResult, Side, information
from vllm_repro_search.plan import SearchState

GOOD, BAD, SKIP = Side.GOOD, Side.BAD, Side.SKIP


def searched(
    search: BisectionPlan, boot: Callable[[int], Side], cost: Callable[[int], float] = lambda _: 1.0
) -> BisectionPlan:
    """Boot what the search asks for until it is over."""
    for _ in range(60 * search.size):
        if (candidate := search.next(cost)) is None:
            return search
        search = search.after(BootResult(candidate, boot(candidate)))
    raise AssertionError("the search does not end")


def after(search: BisectionPlan, *boots: tuple[int, Side]) -> BisectionPlan:
    """Return the search after these boots."""
    for boot in boots:
        search = search.after(BootResult(*boot))
    return search


def history(bad: Sequence[bool], skipped: frozenset[int] = frozenset()) -> Callable[[int], Side]:
    """Return boots of a history in which each bad candidate dies in every boot."""
    return lambda candidate: SKIP if candidate in skipped else BAD if bad[candidate] else GOOD


def flaky(first_bad: int, rate: float, random: Random, candidate: int) -> Side:
    return BAD if candidate >= first_bad and random.random() < rate else GOOD


sizes = st.integers(2, 60)


@given(sizes.flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size - 1))))
def test_without_flakes_and_skips_it_is_a_plain_bisection(case: tuple[int, int]) -> None:
    size, first_bad = case
    done = searched(BisectionPlan(size=size), history([one >= first_bad for one in range(size)]))
    known = done.answer()
    assert (known.state, known.left, known.probability, known.good_again) == (
        SearchState.FOUND,
        (first_bad,),
        1.0,
        (),
    )
    assert len(done.results) <= 2 + ceil(log2(size))
    assert [result.candidate for result in done.results[:2]] == [size - 1, 0]


@given(
    sizes.flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size - 1))),
    st.integers(1, 7),
    st.sampled_from([1.0, 0.5]),
)
def test_boots_ahead_lead_to_the_same_change_in_fewer_rounds(
    case: tuple[int, int], room: int, rate: float
) -> None:
    size, first_bad = case
    boot = history([one >= first_bad for one in range(size)])
    search, rounds = BisectionPlan(size=size, rate=rate), 0
    while chosen := search.ahead(room):
        assert chosen[0] == search.next()
        assert len(set(chosen)) == len(chosen) <= room
        rounds += 1
        for candidate in chosen:
            search = search.after(BootResult(candidate, boot(candidate)))
    one_by_one = searched(BisectionPlan(size=size, rate=rate), boot)
    assert search.answer().left == one_by_one.answer().left == (first_bad,)
    assert rounds <= len(one_by_one.results)
    if rate == 1.0 and room >= 3:
        assert rounds <= ceil(len(one_by_one.results) / 2) + 1


@st.composite
def skipping(draw: st.DrawFn) -> tuple[int, int, frozenset[int]]:
    size = draw(sizes)
    return (
        size,
        draw(st.integers(1, size - 1)),
        frozenset(draw(st.sets(st.integers(1, size - 2)))) if size > 2 else frozenset(),
    )


@given(skipping())
def test_with_skips_the_answer_is_exactly_what_can_be_known(
    case: tuple[int, int, frozenset[int]],
) -> None:
    size, first_bad, skipped = case
    done = searched(
        BisectionPlan(size=size), history([one >= first_bad for one in range(size)], skipped)
    )
    known = done.answer()
    last_good = max(one for one in range(first_bad) if one not in skipped)
    first_death = min(one for one in range(first_bad, size) if one not in skipped)
    assert known.left == tuple(range(last_good + 1, first_death + 1))
    assert known.state is (SearchState.FOUND if len(known.left) == 1 else SearchState.STUCK)
    boots = [result.candidate for result in done.results]
    assert len(boots) == len(set(boots)), "no candidate twice: each answer is certain"


@given(st.lists(st.booleans(), min_size=2, max_size=40))
def test_in_any_history_the_answer_is_a_change(bad: list[bool]) -> None:
    known = searched(BisectionPlan(size=len(bad)), history(bad)).answer()
    if not bad[-1]:
        assert known.state is SearchState.BAD_END_WRONG
    elif bad[0]:
        assert known.state is SearchState.GOOD_END_WRONG
    else:
        (change,) = known.left
        assert (known.state, bad[change - 1], bad[change]) == (SearchState.FOUND, False, True)


@given(skipping(), st.randoms(use_true_random=False), st.sampled_from([1.0, 0.8, 0.5]))
@settings(max_examples=40)
def test_a_replay_of_its_results_is_the_same_search(
    case: tuple[int, int, frozenset[int]], random: Random, rate: float
) -> None:
    size, first_bad, skipped = case

    def boot(candidate: int) -> Side:
        return SKIP if candidate in skipped else flaky(first_bad, rate, random, candidate)

    done = searched(BisectionPlan(size=size, rate=rate), boot)
    again = BisectionPlan(size=size, rate=rate)
    for result in done.results:
        assert again.next() == result.candidate
        again = again.after(result)
    assert (again.answer(), again.next()) == (done.answer(), None)
    assert sum(done.posterior()) == pytest.approx(1)
    if done.answer().state is SearchState.FOUND:
        assert done.count(BAD)[done.answer().left[0]], "the first bad one died before our eyes"


@pytest.mark.parametrize("rate", [0.9, 0.5, 0.3])
def test_95_percent_confidence_is_right_in_95_percent(rate: float) -> None:
    random, right, total = Random(1), 0, 300
    for _ in range(total):
        first_bad = random.randint(1, 29)
        boot = partial(flaky, first_bad, rate, random)
        right += searched(BisectionPlan(size=30, rate=rate), boot).answer().left == (first_bad,)
    assert right / total >= 0.93  # two standard deviations below


def test_a_cheap_candidate_is_preferred() -> None:
    search = after(BisectionPlan(size=100), (99, BAD), (0, GOOD))
    assert (search.next(), search.next(lambda place: 1.0 if place == 30 else 5.0)) == (49, 30)
    assert search.next(lambda place: 1.0 if place == 1 else 5.0) == 49, (
        "it says too little to be worth it"
    )


def test_behind_a_skip_the_search_goes_further_away() -> None:
    search = BisectionPlan(size=101).after(BootResult(100, BAD)).after(BootResult(0, GOOD))
    tried = []
    for _ in range(4):
        candidate = search.next()
        assert candidate is not None
        tried.append(candidate)
        search = search.after(BootResult(candidate, SKIP))
    assert min(abs(one - other) for one in tried for other in tried if one != other) >= 5, tried


@pytest.mark.parametrize(
    ("answers", "state"),
    [
        ([], SearchState.OPEN),
        ([(9, GOOD)], SearchState.BAD_END_WRONG),
        ([(9, SKIP)], SearchState.BAD_END_WRONG),
        ([(9, BAD), (0, BAD)], SearchState.GOOD_END_WRONG),
        ([(9, BAD), (0, SKIP)], SearchState.GOOD_END_WRONG),
        ([(9, BAD), (1, GOOD), (0, SKIP)], SearchState.GOOD_END_WRONG),
        ([(9, BAD), (0, GOOD)], SearchState.OPEN),
        ([(3, GOOD), (4, BAD)], SearchState.OPEN),
    ],
)
def test_both_ends_are_checked(answers: list[tuple[int, Side]], state: SearchState) -> None:
    search = after(BisectionPlan(size=10), *answers)
    assert search.answer().state is state
    assert state.wrong_end is (search.next() is None)
    assert (search.boots_left() == 0) is state.wrong_end


def test_a_flaky_bad_end_is_booted_until_it_crashes() -> None:
    search = searched(BisectionPlan(size=10, rate=0.5), lambda _: GOOD)
    assert {result.candidate for result in search.results} == {9}
    assert search.answer().state is SearchState.BAD_END_WRONG
    assert 5 <= len(search.results) <= 10


def test_a_flaky_good_end_is_called_wrong_only_by_a_death() -> None:
    search = after(BisectionPlan(size=1_000, rate=0.5), (999, BAD), (0, GOOD), (1, BAD))
    assert (search.answer().state, search.next()) == (SearchState.OPEN, 0)
    assert after(search, (0, BAD)).answer().state is SearchState.GOOD_END_WRONG
    assert searched(search, lambda _: GOOD).answer().left == (1,)


def test_good_behind_bad_is_said() -> None:
    """Whichever came first: a death proves what it proves, and the answer is the first change."""
    boots = ((9, BAD), (0, GOOD), (5, GOOD), (3, BAD))
    search = after(BisectionPlan(size=10), *boots)
    assert search.answer().good_again == (5,)
    done = searched(search, history([place >= 2 for place in range(10)])).answer()
    assert (done.left, done.good_again) == ((2,), (5,))
    flaky = after(BisectionPlan(size=10, rate=0.5), *boots)
    assert flaky.answer().good_again == (), "one clean boot of a flaky bug is no contradiction"
    flaky = after(flaky, *[(5, GOOD)] * 4)
    assert flaky.answer().good_again == (5,)
    assert after(flaky, (5, BAD)).answer().good_again == ()


def test_equally_probable_points_are_left_together() -> None:
    search = BisectionPlan(size=42).after(BootResult(41, BAD)).after(BootResult(0, GOOD))
    assert (search.answer().left, search.boots_left()) == (tuple(range(1, 42)), 6)
    assert replace(search, rate=0.5).boots_left() == 17, "a boot tells at most 0.32 bits"
    assert after(BisectionPlan(size=3), (2, BAD), (0, GOOD)).boots_left() == 1


def test_the_probability_of_each_change_point() -> None:
    assert BisectionPlan(size=5).posterior() == pytest.approx([0.1, 0.2, 0.2, 0.2, 0.2, 0.1])
    flaky = after(BisectionPlan(size=5, rate=0.5), (2, GOOD), (3, BAD), (4, GOOD))
    assert BisectionPlan(size=4).answer().probability == 1.0, "also where the sum is a little more"
    assert flaky.posterior() == pytest.approx([part / 0.45 for part in (0.05, 0.1, 0.1, 0.2, 0, 0)])


def test_information_of_a_boot() -> None:
    assert (information(0.5, 1.0), information(1.0, 0.5)) == pytest.approx((1, 0))
    # the capacity of a Z-channel with crossover 1/2
    assert information(0.4, 0.5) == pytest.approx(log2(5) - 2)
