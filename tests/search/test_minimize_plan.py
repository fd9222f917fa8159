"""Delta debugging of numbered units, against made-up engines."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro_search.minimize.plan import Attempt, MinimizationPlan
from vllm_repro_search.plan import SearchState

Units = tuple[int, ...]
Engine = Callable[[Units], Attempt]
N = 14
NEEDED = st.frozensets(st.integers(0, N - 1), max_size=5)
START = st.integers(0, N).map(
    lambda requests: MinimizationPlan(requests=requests, others=N - requests)
)
SMALL = MinimizationPlan(requests=2, others=5)


def settle(search: MinimizationPlan, engine: Engine) -> MinimizationPlan:
    """Return the finished search.

    Every step is made anew from the list of attempts, as after a resume.
    """
    while (units := search.next()) is not None:
        assert units not in {attempt.units for attempt in search.attempts}, "no set is booted twice"
        assert units == tuple(sorted(units))
        search = MinimizationPlan(
            requests=search.requests,
            others=search.others,
            attempts=(*search.attempts, engine(units)),
        )
    return search


def needs(*needed: frozenset[int]) -> Engine:
    """Return an engine that crashes with all units of one of these sets."""
    return lambda units: Attempt(units, any(one <= set(units) for one in needed))


def assert_minimal(found: MinimizationPlan, engine: Engine) -> None:
    """Assert that what is left crashes, and that a boot shows for each unit that it does not crash without it."""
    assert found.kept is not None
    assert engine(found.kept).crashed
    booted = {attempt.units: attempt.crashed for attempt in found.attempts}
    for unit in found.kept:
        assert booted[tuple(one for one in found.kept if one != unit)] is False


@given(START, NEEDED)
def test_exactly_what_is_needed_is_left_after_few_boots(
    start: MinimizationPlan, needed: frozenset[int]
) -> None:
    found = settle(start, needs(needed))
    assert (found.answer().state, frozenset(found.kept or ())) == (SearchState.FOUND, needed)
    assert_minimal(found, needs(needed))
    assert len(found.attempts) <= 1 + N + 2 * len(needed) * math.log2(N)


@given(START, st.lists(NEEDED, min_size=1, max_size=3))
def test_one_of_several_ways_to_crash_is_left(
    start: MinimizationPlan, ways: list[frozenset[int]]
) -> None:
    found = settle(start, needs(*ways))
    assert frozenset(found.kept or ()) in ways
    assert_minimal(found, needs(*ways))


@given(st.sets(st.frozensets(st.integers(0, 6))), st.sets(st.frozensets(st.integers(0, 6))))
def test_without_any_order_of_crashes_no_single_unit_of_what_is_left_can_go(
    crashes: set[frozenset[int]], refusals: set[frozenset[int]]
) -> None:
    def engine(units: Units) -> Attempt:
        crashed = len(units) == 7 or frozenset(units) in crashes
        return Attempt(units, crashed, refused=not crashed and frozenset(units) in refusals)

    found = settle(SMALL, engine)
    assert found.answer().state is SearchState.FOUND
    assert_minimal(found, engine)
    assert len(found.attempts) <= 7 * 8


@given(NEEDED, st.integers(0, 60))
def test_a_resumed_search_gives_the_same_answer(needed: frozenset[int], cut: int) -> None:
    whole = settle(MinimizationPlan(requests=3, others=N - 3), needs(needed))
    begun = MinimizationPlan(requests=3, others=N - 3).after(*whole.attempts[:cut])
    assert begun.attempts == whole.attempts[:cut]
    assert settle(begun, needs(needed)) == whole


def test_groups_of_one_part_go_before_single_units_of_all() -> None:
    found = settle(MinimizationPlan(requests=2, others=4), needs(frozenset({1, 5})))
    whole, *tried = ["".join(map(str, attempt.units)) for attempt in found.attempts]
    assert (whole, tried) == ("012345", ["0145", "01", "145", "45", "15", "1", "5"])


def test_refused_units_without_which_nothing_crashes_are_kept() -> None:
    def engine(units: Units) -> Attempt:
        return Attempt(units, crashed=len(units) == 3, refused=len(units) == 2)

    assert settle(MinimizationPlan(requests=0, others=3), engine).kept == (0, 1, 2)


def test_a_whole_command_that_does_not_crash_ends_it() -> None:
    assert (
        settle(SMALL, lambda units: Attempt(units, crashed=False)).answer().state
        is SearchState.QUIET
    )
    refused = settle(SMALL, lambda units: Attempt(units, crashed=False, refused=True))
    assert (refused.answer().state, refused.kept, len(refused.attempts)) == (
        SearchState.STUCK,
        None,
        1,
    )
    assert SMALL.answer().state is SearchState.OPEN


def test_requests_that_a_crash_left_unsent_cost_no_boot() -> None:
    def engine(units: Units) -> Attempt:
        return Attempt(
            units, {1, 5} <= set(units), unused=tuple(unit for unit in units if 1 < unit < 4)
        )

    found = settle(MinimizationPlan(requests=4, others=3), engine)
    assert found.kept == (1, 5)
    assert not any({2, 3} & set(attempt.units) for attempt in found.attempts[1:])


@pytest.mark.parametrize("group", [(2, 6), (2, 3, 6)])
def test_flags_that_need_each_other_are_removed_together(group: Units) -> None:
    """vLLM refuses some flags of the group without the others; the crash needs unit 4 alone."""

    def engine(units: Units) -> Attempt:
        refused = 0 < len(set(group) & set(units)) < len(group)
        return Attempt(units, not refused and 4 in units, refused)

    found = settle(SMALL, engine)
    assert found.kept == (4,)
    assert_minimal(found, engine)


def test_a_flag_that_another_one_needs_goes_after_it() -> None:
    def engine(units: Units) -> Attempt:
        refused = 3 not in units and 6 in units
        return Attempt(units, not refused and 4 in units, refused)

    assert settle(SMALL, engine).kept == (4,)
