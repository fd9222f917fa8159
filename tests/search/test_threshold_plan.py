"""Search of the shortest crashing prompt, against made-up engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro_search.plan import SearchState
from vllm_repro_search.threshold.plan import PromptResult, PromptSent, ThresholdPlan


def settle(
    search: ThresholdPlan, crashes: Callable[[int], bool], skips: frozenset[int] = frozenset()
) -> tuple[ThresholdPlan, int]:
    """Return the finished search, and its boots."""
    boots = 0
    while plan := search.next():
        boots += 1
        assert boots < 200
        for place, length in enumerate(plan):
            answer = (
                PromptResult.SKIP
                if length in skips
                else PromptResult.CRASH
                if crashes(length)
                else PromptResult.QUIET
            )
            search = search.after(PromptSent(length, answer, first=place == 0))
            if answer is not PromptResult.QUIET:
                break
    return search, boots


def crashes_of(search: ThresholdPlan) -> int:
    return sum(probe.answer is PromptResult.CRASH for probe in search.probes)


BOUNDS = st.tuples(st.integers(1, 50), st.integers(2, 4000), st.integers(0, 4000)).map(
    lambda drawn: ThresholdPlan(
        low=drawn[0], guess=drawn[0] + drawn[1], high=drawn[0] + drawn[1] + drawn[2]
    )
)


@given(BOUNDS)
def test_a_right_formula_costs_at_most_four_crashes(search: ThresholdPlan) -> None:
    found, boots = settle(search, lambda length: length >= search.guess)
    assert (found.answer().state, found.shortest_crash, found.longest_quiet) == (
        SearchState.FOUND,
        search.guess,
        search.guess - 1,
    )
    assert boots == crashes_of(found) <= 4


@given(BOUNDS, st.data())
def test_any_threshold_is_found_whatever_the_formula_is(
    search: ThresholdPlan, data: st.DataObject
) -> None:
    real = data.draw(st.integers(search.low + 1, search.high))
    found, _ = settle(search, lambda length: length >= real)
    assert (found.answer().state, found.shortest_crash, found.longest_quiet) == (
        SearchState.FOUND,
        real,
        real - 1,
    )


@given(BOUNDS)
def test_an_engine_without_the_bug_takes_the_fewest_boots(search: ThresholdPlan) -> None:
    found, boots = settle(search, lambda _: False)
    assert (found.answer().state, found.longest_quiet, boots) == (SearchState.QUIET, search.high, 1)


def test_an_engine_that_always_crashes_is_recognized() -> None:
    found, _ = settle(ThresholdPlan(low=1, guess=100, high=200), lambda _: True)
    assert (found.answer().state, found.shortest_crash, found.longest_quiet) == (
        SearchState.ALL,
        1,
        None,
    )


@given(BOUNDS.filter(lambda search: search.high > search.guess + 2))
def test_a_quiet_prompt_above_the_threshold_is_a_surprise(search: ThresholdPlan) -> None:
    found, _ = settle(search, lambda length: search.guess <= length < search.high)
    assert (found.answer().state, found.quiet_above) == (SearchState.SURPRISE, (search.high,))


def test_a_crash_that_needs_the_prompts_before_it_is_a_surprise() -> None:
    search = ThresholdPlan(low=1, guess=100, high=200)
    found = search.after(
        *(PromptSent(one, PromptResult.QUIET) for one in (1, 50, 99)),
        PromptSent(100, PromptResult.CRASH),
    )
    assert found.next() == (100,), "alone on a fresh server"
    quiet = found.after(PromptSent(100, PromptResult.QUIET, first=True))
    assert (quiet.answer().state, quiet.longest_quiet, quiet.next()) == (
        SearchState.SURPRISE,
        99,
        None,
    )


def test_the_prompts_of_a_search() -> None:
    search = ThresholdPlan(low=1, guess=100, high=200)
    assert search.next() == (1, 50, 99, 100, 101, 103, 107, 115, 131, 163, 200)
    early = search.after(
        PromptSent(1, PromptResult.QUIET),
        PromptSent(50, PromptResult.QUIET),
        PromptSent(99, PromptResult.CRASH),
    )
    assert early.next() == (
        58,
        65,
        71,
        76,
        80,
        83,
        86,
        88,
        *range(90, 99),
    ), "0.165 of the gap each: a crash costs 10 quiet prompts"
    assert early.after(PromptSent(58, PromptResult.SKIP)).next_prompt() == PromptSent(
        57, PromptResult.QUIET
    )
    assert (search.next_prompt(), early.next_prompt()) == (
        PromptSent(1, PromptResult.QUIET),
        PromptSent(58, PromptResult.QUIET),
    )
    known = search.after(
        *(PromptSent(one, PromptResult.QUIET) for one in (1, 50, 99)),
        PromptSent(100, PromptResult.CRASH),
    )
    assert replace(known, probes=known.probes[:-1]).next_prompt() == PromptSent(
        100, PromptResult.CRASH
    )
    for check in (100, 150, 200):
        assert (known.answer().state, known.next_prompt(), known.next()) == (
            SearchState.OPEN,
            PromptSent(check, PromptResult.CRASH),
            (check,),
        )
        known = known.after(PromptSent(check, PromptResult.CRASH, first=True))
    assert (known.answer().state, known.next()) == (SearchState.FOUND, None)


def test_a_crash_is_sent_again_alone_unless_it_was_first() -> None:
    search = ThresholdPlan(low=1, guess=100, high=201).after(
        PromptSent(99, PromptResult.QUIET), PromptSent(100, PromptResult.CRASH)
    )
    assert search.next() == (100,)
    for again in (
        PromptSent(100, PromptResult.CRASH),
        PromptSent(100, PromptResult.CRASH, first=True),
    ):
        assert search.after(again).next_prompt() == PromptSent(150, PromptResult.CRASH), (
            "the middle of 100 and 201"
        )
    assert replace(search, probes=()).after(
        PromptSent(100, PromptResult.CRASH, first=True), PromptSent(99, PromptResult.QUIET)
    ).next() == (150,)
    assert (
        ThresholdPlan(low=1, guess=3, high=3)
        .after(
            PromptSent(1, PromptResult.SKIP),
            PromptSent(2, PromptResult.SKIP),
            PromptSent(3, PromptResult.CRASH),
        )
        .answer()
        .state
        is SearchState.STUCK
    )


@pytest.mark.parametrize(
    ("answers", "state"),
    [
        ((PromptResult.QUIET, PromptResult.QUIET, PromptResult.SKIP), SearchState.STUCK),
        ((PromptResult.QUIET, PromptResult.SKIP, PromptResult.QUIET), SearchState.STUCK),
        ((PromptResult.QUIET, PromptResult.SKIP, PromptResult.CRASH), SearchState.STUCK),
        ((PromptResult.SKIP, PromptResult.CRASH, PromptResult.CRASH), SearchState.STUCK),
        ((PromptResult.QUIET, PromptResult.QUIET, PromptResult.QUIET), SearchState.QUIET),
    ],
)
def test_lengths_without_an_answer_leave_it_open(
    answers: tuple[PromptResult, ...], state: SearchState
) -> None:
    search = ThresholdPlan(low=1, guess=2, high=3).after(
        *(PromptSent(at, one, first=True) for at, one in enumerate(answers, 1))
    )
    assert (search.next_prompt(), search.answer().state) == (None, state)


def test_a_boot_has_at_most_40_prompts() -> None:
    search = ThresholdPlan(low=1, guess=99_998, high=100_000, crash_cost=1000).after(
        PromptSent(99_997, PromptResult.CRASH)
    )
    assert len(search.next() or ()) == 40


@given(BOUNDS, st.data())
def test_skips_never_give_a_wrong_threshold(search: ThresholdPlan, data: st.DataObject) -> None:
    real = data.draw(st.integers(search.low + 1, search.high))
    skips = frozenset(data.draw(st.sets(st.integers(search.low, search.high), max_size=6)))
    found, _ = settle(search, lambda length: length >= real, skips)
    if found.answer().state is SearchState.FOUND:
        assert (found.shortest_crash, found.longest_quiet) == (real, real - 1)
    else:
        assert found.answer().state in (SearchState.STUCK, SearchState.QUIET)
        assert found.answer().state is not SearchState.QUIET or not found.lengths(
            PromptResult.CRASH
        )


def test_a_dear_crash_is_risked_less() -> None:
    def crashes(cost: float) -> int:
        search = ThresholdPlan(low=1, guess=5000, high=5000, crash_cost=cost)
        return crashes_of(settle(search, lambda length: length >= 1234)[0])

    assert crashes(30) < crashes(1)


@pytest.mark.parametrize("change", [{"low": 0}, {"guess": 1}, {"high": 99}, {"crash_cost": 0.5}])
def test_impossible_searches_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no search"):
        # a wrong one each
        replace(ThresholdPlan(low=1, guess=100, high=200), **change)  # type: ignore[arg-type]
