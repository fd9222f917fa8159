from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.verdict.soak import SoakCount


def test_a_steady_soak_has_no_drift() -> None:
    count = SoakCount(asked=100.0, began=1000.0)
    for start in range(100):
        count.take([1000.0 + start + 0.25, 1000.0 + start + 0.75], 20, ok=True)
    soak = count.end(1100.2, restarts=0)
    assert (soak.requests, soak.errors, soak.seconds, soak.whole) == (100, 0, 100.0, True)
    assert soak.tenths == pytest.approx([200.0] * 10)
    assert soak.drift == pytest.approx(1.0)


def test_an_engine_that_slows_down_and_answers_that_fail() -> None:
    count = SoakCount(asked=10.0, began=0.0)
    count.take([0.5], 100, ok=True)
    count.take([9.5], 50, ok=True)
    count.take([], 0, ok=False)
    soak = count.end(10.0, restarts=0)
    assert (soak.drift, soak.errors) == (0.5, 1)


def test_a_soak_that_a_death_cut_short_has_no_drift() -> None:
    count = SoakCount(asked=1800.0, began=0.0)
    count.take([1.0], 100, ok=True)
    soak = count.end(300.0, restarts=1)
    assert (soak.whole, soak.drift, soak.seconds, soak.restarts) == (False, None, 300.0, 1)


@given(st.lists(st.tuples(st.lists(st.floats(-5.0, 130.0), max_size=8), st.integers(0, 50)), max_size=20))
def test_no_token_is_counted_twice_and_none_from_after_the_end(requests: list[tuple[list[float], int]]) -> None:
    count = SoakCount(asked=100.0, began=0.0)
    for chunks, tokens in requests:
        count.take(chunks, tokens, ok=True)
    inside = sum(
        sum(0 <= moment < 100 for moment in chunks) * tokens / len(chunks) for chunks, tokens in requests if chunks
    )
    assert sum(count.tenths) <= sum(tokens for _, tokens in requests) + 1e-6
    # What came within the last bit of the time before the start counts as the start.
    assert sum(count.tenths) >= inside - 1e-6
