"""Ten weeks of nights, many times over: what is true is called, and nothing else."""

from __future__ import annotations

import pytest

from tests.history.scored import score
from tests.history.simulated import SLOW, Weeks

SEEDS = 40


def test_the_loss_the_fix_and_the_host_and_nothing_else() -> None:
    scores = [score(Weeks(seed)) for seed in range(SEEDS)]
    assert all(one.loss is not None and one.fix is not None for one in scores)
    assert all(one.suspect is not None and one.suspect.host == SLOW for one in scores)
    assert not any(one.false_fixes or one.false_suspects for one in scores)
    # benchmarks/README.md: 1 false call in 100 such histories.
    assert sum(len(one.false_calls) for one in scores) <= 1
    assert sum(one.right for one in scores) >= SEEDS - 1


@pytest.mark.parametrize("noise", [0.01, 0.04])
def test_where_nothing_happens_hardly_anything_is_called(noise: float) -> None:
    scores = [score(Weeks(seed, loss=None, slow=None, fix=None, noise=noise)) for seed in range(SEEDS // 4)]
    assert not any(one.loss or one.fix or one.suspect or one.false_fixes or one.false_suspects for one in scores)
    assert sum(len(one.false_calls) for one in scores) <= 1
