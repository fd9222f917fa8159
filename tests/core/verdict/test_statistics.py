from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro.verdict.statistics import (
    clean_needed,
    clean_streak,
    excluded_rate,
    fisher,
    lower_bound,
)


@pytest.mark.parametrize(
    ("crashed", "boots", "bound", "needed"),
    [
        (0, 10, 0.0, None),
        (1, 1, 0.05, 59),
        (5, 5, 0.55, 4),
        (4, 5, 0.34, 8),
        (5, 10, 0.22, 12),
    ],
)
def test_known_bounds(crashed: int, boots: int, bound: float, needed: int | None) -> None:
    assert lower_bound(crashed, boots) == pytest.approx(bound, abs=0.006)
    assert clean_needed(crashed, boots) == needed
    assert lower_bound(5_000, 10_000) == pytest.approx(0.4918, abs=1e-4)  # of a long history


@pytest.mark.parametrize(
    ("crashed", "boots", "streak"), [(0, 5, None), (1, 1, 72), (5, 5, 9), (30, 30, 5), (35, 70, 21)]
)
def test_quiet_nights_that_are_needed(crashed: int, boots: int, streak: int | None) -> None:
    assert clean_streak(crashed, boots) == streak


@pytest.mark.parametrize(("clean", "rate"), [(0, 1.0), (3, 0.63), (30, 0.10)])
def test_excluded_rates(clean: int, rate: float) -> None:
    assert excluded_rate(clean) == pytest.approx(rate, abs=0.005)


def test_only_impossible_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="4 crashes of 3 trials"):
        lower_bound(4, 3)
    with pytest.raises(ValueError, match="4 crashes of 3 trials"):
        fisher(4, 3, 0, 1)
    assert fisher(1, 2, 2, 2) == pytest.approx(1.0)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))))
@settings(max_examples=60)
def test_clean_needed_is_the_least_that_suffices(pair: tuple[int, int]) -> None:
    crashed, boots = pair
    rate, needed = lower_bound(crashed, boots), clean_needed(crashed, boots) or 0
    assert 0 < rate <= crashed / boots
    assert (1 - rate) ** needed <= 0.05 + 1e-6
    if needed > 1:
        assert (1 - rate) ** (needed - 1) > 0.05 - 1e-6


@pytest.mark.parametrize(
    ("sides", "chance"),
    [
        ((5, 5, 0, 4), 1 / 126),
        ((3, 3, 0, 3), 0.05),
        ((1, 1, 0, 1), 0.5),
        ((3, 4, 1, 4), 17 / 70),
        ((0, 3, 0, 3), 1.0),
    ],
)
def test_fishers_exact_test(sides: tuple[int, int, int, int], chance: float) -> None:
    assert fisher(*sides) == pytest.approx(chance)


@given(st.integers(1, 40), st.integers(0, 40))
def test_watching_asks_for_more_boots_than_one_comparison(crashed: int, quiet: int) -> None:
    once, watching = clean_needed(crashed, crashed + quiet), clean_streak(crashed, crashed + quiet)
    assert once is not None
    assert watching is not None
    assert watching >= once
    rate = lower_bound(crashed, crashed + quiet)
    assert (1 - rate) ** watching * crashed * (crashed + 1) <= 0.05 * (1 + 1e-6)
    assert clean_streak(0, quiet) is None
