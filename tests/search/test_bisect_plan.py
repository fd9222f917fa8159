"""The search of a bisection, with random skips, flaky crashes and histories with several changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil, log2
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro_search.bisect.plan import UNLIKELY, Answer, Search, State, information

GOOD, BAD, SKIP = Answer.GOOD, Answer.BAD, Answer.SKIP


def searched(search: Search, boot: Callable[[int], Answer], cost: Callable[[int], float] = lambda _: 1.0) -> Search:
    """Boot what the search asks for until it is over."""
    for _ in range(60 * search.size):
        candidate = search.choose(cost)
        if candidate is None:
            return search
        search = search.after(candidate, boot(candidate))
    raise AssertionError("the search does not end")


def history(bad: Sequence[bool], skipped: frozenset[int] = frozenset()) -> Callable[[int], Answer]:
    """Return boots of a history in which each bad candidate dies in every boot."""
    return lambda candidate: SKIP if candidate in skipped else BAD if bad[candidate] else GOOD


def flaky(first_bad: int, rate: float, random: Random, candidate: int) -> Answer:
    return BAD if candidate >= first_bad and random.random() < rate else GOOD


sizes = st.integers(2, 60)


@given(sizes.flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size - 1))))
def test_without_flakes_and_skips_it_is_a_plain_bisection(case: tuple[int, int]) -> None:
    size, first_bad = case
    done = searched(Search(size=size), history([one >= first_bad for one in range(size)]))
    known = done.conclusion()
    assert (known.state, known.left, known.probability, known.good_again) == (State.FOUND, (first_bad,), 1.0, ())
    assert len(done.probes) <= 2 + ceil(log2(size))
    assert [probe.candidate for probe in done.probes[:2]] == [size - 1, 0]


@given(
    st.lists(st.sampled_from([1.0, UNLIKELY]), min_size=1, max_size=60).flatmap(
        lambda weights: st.tuples(st.just(tuple(weights)), st.integers(1, len(weights)))
    )
)
def test_an_unlikely_change_is_found_all_the_same(case: tuple[tuple[float, ...], int]) -> None:
    weights, first_bad = case
    search = Search(size=len(weights) + 1, weights=weights)
    known = searched(search, history([one >= first_bad for one in range(search.size)])).conclusion()
    assert (known.state, known.left, known.probability) == (State.FOUND, (first_bad,), 1.0)


@given(
    sizes.flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size - 1))),
    st.integers(1, 7),
    st.sampled_from([1.0, 0.5]),
)
def test_boots_ahead_lead_to_the_same_change_in_fewer_rounds(case: tuple[int, int], room: int, rate: float) -> None:
    size, first_bad = case
    boot = history([one >= first_bad for one in range(size)])
    search, rounds = Search(size=size, rate=rate), 0
    while chosen := search.ahead(room):
        assert chosen[0] == search.choose()
        assert len(set(chosen)) == len(chosen) <= room
        rounds += 1
        for candidate in chosen:
            search = search.after(candidate, boot(candidate))
    one_by_one = searched(Search(size=size, rate=rate), boot)
    assert search.conclusion().left == one_by_one.conclusion().left == (first_bad,)
    assert rounds <= len(one_by_one.probes)
    if rate == 1.0 and room >= 3:
        assert rounds <= ceil(len(one_by_one.probes) / 2) + 1


def test_unlikely_changes_save_boots() -> None:
    random, boots = Random(2), [0, 0]
    for _ in range(100):
        weights = tuple(random.choices([1.0, UNLIKELY], k=200))
        (first_bad,) = random.choices(range(1, 201), weights)
        answers = history([one >= first_bad for one in range(201)])
        for place, known in enumerate(((), weights)):
            boots[place] += len(searched(Search(size=201, weights=known), answers).probes)
    assert boots[1] < 0.97 * boots[0]


@st.composite
def skipping(draw: st.DrawFn) -> tuple[int, int, frozenset[int]]:
    size = draw(sizes)
    return (
        size,
        draw(st.integers(1, size - 1)),
        frozenset(draw(st.sets(st.integers(1, size - 2)))) if size > 2 else frozenset(),
    )


@given(skipping())
def test_with_skips_the_answer_is_exactly_what_can_be_known(case: tuple[int, int, frozenset[int]]) -> None:
    size, first_bad, skipped = case
    done = searched(Search(size=size), history([one >= first_bad for one in range(size)], skipped))
    known = done.conclusion()
    last_good = max(one for one in range(first_bad) if one not in skipped)
    first_death = min(one for one in range(first_bad, size) if one not in skipped)
    assert known.left == tuple(range(last_good + 1, first_death + 1))
    assert known.state is (State.FOUND if len(known.left) == 1 else State.STUCK)
    boots = [probe.candidate for probe in done.probes]
    assert len(boots) == len(set(boots)), "no candidate twice: each answer is certain"


@given(st.lists(st.booleans(), min_size=2, max_size=40))
def test_in_any_history_the_answer_is_a_change(bad: list[bool]) -> None:
    known = searched(Search(size=len(bad)), history(bad)).conclusion()
    if not bad[-1]:
        assert known.state is State.BAD_END_WRONG
    elif bad[0]:
        assert known.state is State.GOOD_END_WRONG
    else:
        (change,) = known.left
        assert (known.state, bad[change - 1], bad[change]) == (State.FOUND, False, True)


@given(skipping(), st.randoms(use_true_random=False), st.sampled_from([1.0, 0.8, 0.5]))
@settings(max_examples=40)
def test_a_replay_of_its_probes_is_the_same_search(
    case: tuple[int, int, frozenset[int]], random: Random, rate: float
) -> None:
    size, first_bad, skipped = case

    def boot(candidate: int) -> Answer:
        return SKIP if candidate in skipped else flaky(first_bad, rate, random, candidate)

    done = searched(Search(size=size, rate=rate), boot)
    again = Search(size=size, rate=rate)
    for probe in done.probes:
        assert again.choose() == probe.candidate
        again = again.after(probe.candidate, probe.answer)
    assert (again.conclusion(), again.choose()) == (done.conclusion(), None)
    assert sum(done.posterior()) == pytest.approx(1)
    if done.conclusion().state is State.FOUND:
        assert done.count(BAD)[done.conclusion().left[0]], "the first bad one died before our eyes"


@pytest.mark.parametrize("rate", [0.9, 0.5, 0.3])
def test_95_percent_confidence_is_right_in_95_percent(rate: float) -> None:
    random, right, total = Random(1), 0, 300
    for _ in range(total):
        first_bad = random.randint(1, 29)
        boot = partial(flaky, first_bad, rate, random)
        right += searched(Search(size=30, rate=rate), boot).conclusion().left == (first_bad,)
    assert right / total >= 0.93  # two standard deviations below


def test_a_cheap_candidate_is_preferred() -> None:
    search = Search(size=100).after(99, BAD).after(0, GOOD)
    assert search.choose() == 49
    assert search.choose(lambda one: 1.0 if one == 30 else 5.0) == 30
    assert search.choose(lambda one: 1.0 if one == 1 else 5.0) == 49, "it says too little to be worth it"


def test_behind_a_skip_the_search_goes_further_away() -> None:
    search = Search(size=101).after(100, BAD).after(0, GOOD)
    tried = []
    for _ in range(4):
        candidate = search.choose()
        assert candidate is not None
        tried.append(candidate)
        search = search.after(candidate, SKIP)
    assert min(abs(one - other) for one in tried for other in tried if one != other) >= 5, tried


@pytest.mark.parametrize(
    ("answers", "state"),
    [
        ([], State.OPEN),
        ([(9, GOOD)], State.BAD_END_WRONG),
        ([(9, SKIP)], State.BAD_END_WRONG),
        ([(9, BAD), (0, BAD)], State.GOOD_END_WRONG),
        ([(9, BAD), (0, SKIP)], State.GOOD_END_WRONG),
        ([(9, BAD), (1, GOOD), (0, SKIP)], State.GOOD_END_WRONG),
        ([(9, BAD), (0, GOOD)], State.OPEN),
    ],
)
def test_both_ends_are_checked(answers: list[tuple[int, Answer]], state: State) -> None:
    search = Search(size=10)
    for one in answers:
        search = search.after(*one)
    assert search.conclusion().state is state
    assert state.wrong_end is (search.choose() is None)
    assert (search.boots_left() == 0) is state.wrong_end


def test_a_flaky_bad_end_is_booted_until_it_dies_or_is_called_good() -> None:
    search = searched(Search(size=10, rate=0.5), lambda _: GOOD)
    assert {probe.candidate for probe in search.probes} == {9}
    assert search.conclusion().state is State.BAD_END_WRONG
    assert 5 <= len(search.probes) <= 10


def test_a_flaky_good_end_is_called_wrong_only_by_a_death() -> None:
    search = Search(size=1_000, rate=0.5).after(999, BAD).after(0, GOOD).after(1, BAD)
    assert search.conclusion().state is State.OPEN
    assert search.choose() == 0
    assert search.after(0, BAD).conclusion().state is State.GOOD_END_WRONG
    assert searched(search, lambda _: GOOD).conclusion().left == (1,)


def test_good_behind_bad_is_said() -> None:
    """Whichever came first: a death proves what it proves, and the answer is the first change."""
    search = Search(size=10).after(9, BAD).after(0, GOOD).after(5, GOOD).after(3, BAD)
    assert search.conclusion().good_again == (5,)
    done = searched(search, history([one >= 2 for one in range(10)]))
    assert (done.conclusion().left, done.conclusion().good_again) == ((2,), (5,))
    flaky = Search(size=10, rate=0.5).after(9, BAD).after(0, GOOD).after(5, GOOD).after(3, BAD)
    assert flaky.conclusion().good_again == (), "one clean boot of a flaky bug is no contradiction"
    for _ in range(4):
        flaky = flaky.after(5, GOOD)
    assert flaky.conclusion().good_again == (5,)
    assert flaky.after(5, BAD).conclusion().good_again == ()


def test_equally_probable_points_are_left_together() -> None:
    search = Search(size=42).after(41, BAD).after(0, GOOD)
    assert search.conclusion().left == tuple(range(1, 42))
    assert search.boots_left() == 6


def test_the_probability_of_each_change_point() -> None:
    assert Search(size=5).posterior() == pytest.approx([0.1, 0.2, 0.2, 0.2, 0.2, 0.1])
    assert Search(size=4, weights=(1.0, 2.0, 1.0)).posterior() == pytest.approx([0.1, 0.2, 0.4, 0.2, 0.1])
    flaky = Search(size=5, rate=0.5).after(2, GOOD).after(3, BAD).after(4, GOOD)
    assert Search(size=4).conclusion().probability == 1.0, "also where the sum is a little more"
    half = Search(size=4, weights=(2.0, 1.0, 1.0), confidence=0.5).after(3, BAD).after(0, GOOD).conclusion()
    assert (half.state, half.left, half.probability) == (State.FOUND, (1,), 0.5)
    assert flaky.posterior() == pytest.approx([one / 0.45 for one in (0.05, 0.1, 0.1, 0.2, 0, 0)])


def test_information_of_a_boot() -> None:
    assert information(0.5, 1.0) == pytest.approx(1)
    assert information(1.0, 0.5) == pytest.approx(0)
    assert information(0.4, 0.5) == pytest.approx(log2(5) - 2)  # the capacity of a Z-channel with crossover 1/2


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 1},
        {"size": 5, "rate": 0.0},
        {"size": 5, "rate": 1.1},
        {"size": 5, "confidence": 0.0},
        {"size": 5, "confidence": 1.0},
        {"size": 5, "weights": (1.0,)},
    ],
)
def test_a_search_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no search"):
        Search(**wrong)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(ValueError, match="no search: 1 weights of 4 change points"):
        Search(size=5, weights=(1.0,))
    with pytest.raises(ValueError, match="no candidate 5 of 5"):
        Search(size=5).after(5, GOOD)
