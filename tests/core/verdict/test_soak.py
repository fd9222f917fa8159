from __future__ import annotations

import pytest

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
    count.take([-2.0, 10.5], 90, ok=True)  # outside of the soak
    count.take([], 0, ok=False)
    count.take([], 0, ok=False)
    soak = count.end(10.0, restarts=0)
    assert (soak.drift, soak.errors, sum(soak.tenths)) == (0.5, 2, 150.0)


def test_a_soak_that_a_death_cut_short_has_no_drift() -> None:
    count = SoakCount(asked=1800.0, began=1000.0)
    count.take([1001.0], 100, ok=True)
    soak = count.end(1300.0, restarts=1)
    assert (soak.whole, soak.drift, soak.seconds, soak.restarts) == (False, None, 300.0, 1)
