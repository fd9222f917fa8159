from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro.verdict.statistics import clean_needed, excluded_rate, fisher, lower_bound


@pytest.mark.parametrize(
    ("crashed", "boots", "bound", "needed"),
    [
        (3, 3, 0.37, 7),
        (5, 5, 0.55, 4),
        (10, 10, 0.74, 3),
        (4, 5, 0.34, 8),
        (3, 5, 0.19, 15),
        (8, 10, 0.49, 5),
        (5, 10, 0.22, 12),
    ],
)
def test_known_bounds(crashed: int, boots: int, bound: float, needed: int) -> None:
    assert lower_bound(crashed, boots) == pytest.approx(bound, abs=0.006)
    assert clean_needed(crashed, boots) == needed


def test_one_crash_needs_fifty_nine_quiet_boots() -> None:
    assert lower_bound(1, 1) == pytest.approx(0.05)
    assert clean_needed(1, 1) == 59


@pytest.mark.parametrize(("clean", "rate"), [(3, 0.63), (10, 0.26), (30, 0.10)])
def test_excluded_rates(clean: int, rate: float) -> None:
    assert excluded_rate(clean) == pytest.approx(rate, abs=0.005)


def test_no_crash_gives_no_bound() -> None:
    assert lower_bound(0, 10) == 0.0
    assert clean_needed(0, 10) is None
    assert excluded_rate(0) == 1.0


def test_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="4 crashes of 3 boots"):
        lower_bound(4, 3)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))))
@settings(max_examples=60)
def test_clean_needed_is_the_least_that_suffices(pair: tuple[int, int]) -> None:
    crashed, boots = pair
    rate, needed = lower_bound(crashed, boots), clean_needed(crashed, boots)
    assert 0 < rate <= crashed / boots
    assert needed is not None
    assert (1 - rate) ** needed <= 0.05 + 1e-6
    if needed > 1:
        assert (1 - rate) ** (needed - 1) > 0.05 - 1e-6


@given(st.integers(1, 30), st.integers(0, 29))
@settings(max_examples=60)
def test_more_crashes_never_lower_the_bound(boots: int, crashed: int) -> None:
    crashed = min(crashed, boots - 1)
    assert lower_bound(crashed, boots) <= lower_bound(crashed + 1, boots) + 1e-9


@pytest.mark.parametrize(
    ("sides", "chance"),
    [((5, 5, 0, 4), 1 / 126), ((3, 3, 0, 3), 0.05), ((1, 1, 0, 1), 0.5), ((3, 4, 1, 4), 17 / 70), ((0, 3, 0, 3), 1.0)],
)
def test_fishers_exact_test(sides: tuple[int, int, int, int], chance: float) -> None:
    assert fisher(*sides) == pytest.approx(chance)


def test_fisher_refuses_impossible_counts() -> None:
    with pytest.raises(ValueError, match="4 crashes of 3 boots"):
        fisher(4, 3, 0, 1)


@given(st.integers(1, 15), st.integers(1, 15), st.data())
@settings(max_examples=60)
def test_fisher_is_least_with_all_crashes_on_one_side(boots: int, others: int, data: st.DataObject) -> None:
    crashed = data.draw(st.integers(1, boots))
    chances = [fisher(crashed, boots, other, others) for other in range(others + 1)]
    assert all(0 < chance <= 1 + 1e-9 for chance in chances)
    assert chances[0] == min(chances)


def test_long_histories_have_a_bound() -> None:
    assert lower_bound(5_000, 10_000) == pytest.approx(0.4918, abs=1e-4)
