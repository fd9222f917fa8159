"""Search of the shortest crashing prompt, against made-up engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro_search.threshold.plan import Answer, Probe, Search, State


def settle(search: Search, crashes: Callable[[int], bool], skips: frozenset[int] = frozenset()) -> tuple[Search, int]:
    """Return the finished search, and its boots."""
    boots = 0
    while plan := search.plan():
        boots += 1
        assert boots < 200
        for place, length in enumerate(plan):
            answer = Answer.SKIP if length in skips else Answer.CRASH if crashes(length) else Answer.QUIET
            search = search.after(Probe(length, answer, first=place == 0))
            if answer is not Answer.QUIET:
                break
    return search, boots


def crashes_of(search: Search) -> int:
    return sum(probe.answer is Answer.CRASH for probe in search.probes)


BOUNDS = st.tuples(st.integers(1, 50), st.integers(2, 4000), st.integers(0, 4000)).map(
    lambda drawn: Search(low=drawn[0], guess=drawn[0] + drawn[1], high=drawn[0] + drawn[1] + drawn[2])
)


@given(BOUNDS)
def test_a_right_formula_costs_at_most_four_crashes(search: Search) -> None:
    found, boots = settle(search, lambda length: length >= search.guess)
    assert (found.state, found.shortest_crash, found.longest_quiet) == (State.FOUND, search.guess, search.guess - 1)
    assert boots == crashes_of(found) <= 4


@given(BOUNDS, st.data())
def test_any_threshold_is_found_whatever_the_formula_is(search: Search, data: st.DataObject) -> None:
    real = data.draw(st.integers(search.low + 1, search.high))
    found, _ = settle(search, lambda length: length >= real)
    assert (found.state, found.shortest_crash, found.longest_quiet) == (State.FOUND, real, real - 1)


@given(BOUNDS)
def test_an_engine_without_the_bug_takes_the_fewest_boots(search: Search) -> None:
    found, boots = settle(search, lambda _: False)
    assert (found.state, found.longest_quiet, boots) == (State.QUIET, search.high, 1)


def test_an_engine_that_always_crashes_is_recognized() -> None:
    found, _ = settle(Search(low=1, guess=100, high=200), lambda _: True)
    assert (found.state, found.shortest_crash, found.longest_quiet) == (State.ALL, 1, None)


@given(BOUNDS.filter(lambda search: search.high > search.guess + 2))
def test_a_quiet_prompt_above_the_threshold_is_a_surprise(search: Search) -> None:
    found, _ = settle(search, lambda length: search.guess <= length < search.high)
    assert (found.state, found.quiet_above) == (State.SURPRISE, (search.high,))


def test_a_crash_that_needs_the_prompts_before_it_is_a_surprise() -> None:
    search = Search(low=1, guess=100, high=200)
    found = search.after(*(Probe(one, Answer.QUIET) for one in (1, 50, 99)), Probe(100, Answer.CRASH))
    assert found.plan() == (100,), "alone on a fresh server"
    quiet = found.after(Probe(100, Answer.QUIET, first=True))
    assert (quiet.state, quiet.longest_quiet, quiet.plan()) == (State.SURPRISE, 99, ())


def test_the_prompts_of_a_search() -> None:
    search = Search(low=1, guess=100, high=200)
    assert search.plan() == (1, 50, 99, 100, 101, 103, 107, 115, 131, 163, 200)
    early = search.after(Probe(1, Answer.QUIET), Probe(50, Answer.QUIET), Probe(99, Answer.CRASH))
    assert early.plan() == (58, 65, 71, 76, 80, 83, 86, 88, *range(90, 99)), (
        "0.165 of the gap each: a crash costs 10 quiet prompts"
    )
    assert early.after(Probe(58, Answer.SKIP)).plan()[0] == 57
    assert (search.choose(), early.choose()) == (Probe(1, Answer.QUIET), Probe(58, Answer.QUIET))
    known = search.after(*(Probe(one, Answer.QUIET) for one in (1, 50, 99)), Probe(100, Answer.CRASH))
    assert replace(known, probes=known.probes[:-1]).choose() == Probe(100, Answer.CRASH)
    for check in (100, 150, 200):
        assert (known.state, known.choose(), known.plan()) == (State.OPEN, Probe(check, Answer.CRASH), (check,))
        known = known.after(Probe(check, Answer.CRASH, first=True))
    assert (known.state, known.plan()) == (State.FOUND, ())


def test_a_crash_is_sent_again_alone_unless_it_was_first() -> None:
    search = Search(low=1, guess=100, high=201).after(Probe(99, Answer.QUIET), Probe(100, Answer.CRASH))
    assert search.plan() == (100,)
    for again in (Probe(100, Answer.CRASH), Probe(100, Answer.CRASH, first=True)):
        assert search.after(again).choose() == Probe(150, Answer.CRASH), "the middle of 100 and 201"
    assert replace(search, probes=()).after(Probe(100, Answer.CRASH, first=True), Probe(99, Answer.QUIET)).plan() == (
        150,
    )
    assert (
        Search(low=1, guess=3, high=3).after(Probe(1, Answer.SKIP), Probe(2, Answer.SKIP), Probe(3, Answer.CRASH)).state
        is State.STUCK
    )


@pytest.mark.parametrize(
    ("answers", "state"),
    [
        ((Answer.QUIET, Answer.QUIET, Answer.SKIP), State.STUCK),
        ((Answer.QUIET, Answer.SKIP, Answer.QUIET), State.STUCK),
        ((Answer.QUIET, Answer.SKIP, Answer.CRASH), State.STUCK),
        ((Answer.SKIP, Answer.CRASH, Answer.CRASH), State.STUCK),
        ((Answer.QUIET, Answer.QUIET, Answer.QUIET), State.QUIET),
    ],
)
def test_lengths_without_an_answer_leave_it_open(answers: tuple[Answer, ...], state: State) -> None:
    search = Search(low=1, guess=2, high=3).after(*(Probe(at, one, first=True) for at, one in enumerate(answers, 1)))
    assert (search.choose(), search.state) == (None, state)


def test_a_boot_has_at_most_40_prompts() -> None:
    search = Search(low=1, guess=99_998, high=100_000, crash_cost=1000).after(Probe(99_997, Answer.CRASH))
    assert len(search.plan()) == 40


@given(BOUNDS, st.data())
def test_skips_never_give_a_wrong_threshold(search: Search, data: st.DataObject) -> None:
    real = data.draw(st.integers(search.low + 1, search.high))
    skips = frozenset(data.draw(st.sets(st.integers(search.low, search.high), max_size=6)))
    found, _ = settle(search, lambda length: length >= real, skips)
    if found.state is State.FOUND:
        assert (found.shortest_crash, found.longest_quiet) == (real, real - 1)
    else:
        assert found.state in (State.STUCK, State.QUIET)
        assert found.state is not State.QUIET or not found.lengths(Answer.CRASH)


def test_a_dear_crash_is_risked_less() -> None:
    def crashes(cost: float) -> int:
        search = Search(low=1, guess=5000, high=5000, crash_cost=cost)
        return crashes_of(settle(search, lambda length: length >= 1234)[0])

    assert crashes(30) < crashes(1)


@pytest.mark.parametrize("change", [{"low": 0}, {"guess": 1}, {"high": 99}, {"crash_cost": 0.5}])
def test_impossible_searches_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no search"):
        replace(Search(low=1, guess=100, high=200), **change)  # type: ignore[arg-type]  # a wrong one each
