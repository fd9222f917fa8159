from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from itertools import permutations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.nights.made import FIRST, NIGHTLY, arm, row
from vllm_repro.report.runs import Run
from vllm_repro.verdict.verdict import Expected, Standing, Verdict
from vllm_repro_nights.bug_state import ABSENT, BugState, bug_state

Rows = Sequence[tuple[date, Run]]


def verdicts(rows: Rows) -> list[str]:
    """Return the verdict after each night."""
    return [bug_state(rows[: number + 1]).verdict for number in range(len(rows))]


def test_a_bug_is_fixed_and_regresses() -> None:
    rows = [row(0, 5, 5), row(1, 5, 5), row(2, 0, 1), row(3, 0, 5), row(4, 2, 2), row(5, 0, 80)]
    assert verdicts(rows) == [*["reproduces"] * 3, "fixed", "regressed", "fixed"]
    assert (
        bug_state(rows[:3]).reason
        == f"died in 10 of 10 boots, last in {NIGHTLY.format(1)}; 1 of 6 quiet boots for a fix"
    )
    assert (
        bug_state(rows[:4]).reason
        == f"died in 10 of 10 boots, then 6 quiet in a row up to {NIGHTLY.format(3)}"
    )
    regressed = bug_state(rows[:5])
    assert (regressed.crashed, regressed.boots) == (2, 2), "older crashes have another rate"


@pytest.mark.parametrize("crashes", [0, 1])
def test_a_release_that_is_declared_good(crashes: int) -> None:
    rows = [
        row(0, crashes, 1, version="0.24.0"),
        row(1, 0, 1, version="0.25.0", standing=Standing.GOOD),
    ]
    assert bug_state(rows).verdict is Verdict.FIXED
    assert bug_state(rows).reason == "0.25.0 is declared good, and lived"
    died = row(2, 1, 1, version="0.25.0", standing=Standing.GOOD)
    assert bug_state([*rows, died]).verdict is Verdict.REGRESSED


def test_a_declared_bug_is_no_regression() -> None:
    rows = [
        row(0, 0, 1, version="0.18.0", standing=Standing.GOOD),
        row(1, 1, 1, version="0.23.0", standing=Standing.BAD),
    ]
    assert verdicts(rows) == ["fixed", "reproduces"]


def test_a_later_crash_of_an_older_release_is_no_regression() -> None:
    rows = [
        row(0, 5, 5, version="0.23.0"),
        row(1, 0, 9, version="0.24.0"),
        row(2, 5, 5, version="0.22.0"),
    ]
    assert bug_state(rows).verdict is Verdict.FIXED
    assert (bug_state(rows).crashed, bug_state(rows).boots) == (10, 10)
    assert bug_state([*rows, row(3, 1, 1, version="0.25.0")]).verdict is Verdict.REGRESSED


def test_boots_of_one_release_are_one_sample() -> None:
    """A release does not change: its own quiet boots are no fix of its crash."""
    crash, quiet = row(0, 1, 1, version="0.24.0"), row(1, 0, 100, version="0.24.0")
    for rows in ([crash, quiet], [quiet, crash]):
        assert bug_state(rows).verdict is Verdict.REPRODUCES
        assert "died in 1 of 101 boots (flaky)" in bug_state(rows).reason


def test_a_release_branch_does_not_hide_a_nightly_fix() -> None:
    rows = [row(0, 5, 5), row(1, 0, 9), row(2, 5, 5, version="0.24.1")]
    assert bug_state(rows).verdict is Verdict.FIXED
    assert bug_state(rows[2:]).verdict is Verdict.REPRODUCES


@pytest.mark.parametrize("order", list(permutations((0, 1, 2))))
def test_a_bisection_of_a_declared_fix(order: tuple[int, ...]) -> None:
    boots = (
        ("0.19.0", 0, Standing.UNKNOWN),
        ("0.23.0", 1, Standing.BAD),
        ("0.33.0", 0, Standing.GOOD),
    )
    rows = [
        row(night, boots[which][1], 1, version=boots[which][0], standing=boots[which][2])
        for night, which in enumerate(order)
    ]
    assert bug_state(rows).verdict is Verdict.FIXED


_RUN = st.tuples(
    st.sampled_from(["0.22.0", "0.23.0", "0.24.0"]), st.integers(0, 2), st.integers(0, 12)
)


@given(st.lists(_RUN, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_the_order_of_runs_does_not_matter(
    runs: list[tuple[str, int, int]], shuffle: Random
) -> None:
    def state() -> BugState:
        return bug_state(
            [
                row(night, min(crashed, boots), boots, version=version)
                for night, (version, crashed, boots) in enumerate(runs)
            ]
        )

    before, crashed = state(), any(min(run[1:]) for run in runs)
    shuffle.shuffle(runs)
    assert state() == before
    assert 0 <= before.crashed <= before.boots
    assert crashed or before.verdict in (
        Verdict.QUIET,
        Verdict.INCONCLUSIVE,
    ), "no fix without a crash"


def test_what_decides_nothing_changes_nothing() -> None:
    assert verdicts([row(0, 0, 0), row(1, 3, 3), row(2, 0, 0)]) == [
        "inconclusive",
        *["reproduces"] * 2,
    ]
    assert bug_state([row(0, 0, 3)]).reason == "never died here; quiet boots: 3"
    source = row(1, 1, 1, version="0.24.0+commit.4689392ab1")
    assert bug_state([source]) == BugState()


def test_the_worst_host_decides() -> None:
    rows = [row(night, 1, 1, host=host) for night in range(9) for host in ("aaaa0001", "bbbb0002")]
    rows += [row(9, 0, 50)]
    assert bug_state(rows).verdict is Verdict.REPRODUCES
    assert bug_state([*rows, row(10, 0, 50, host="bbbb0002")]).verdict is Verdict.FIXED
    never = row(10, 0, 50, host="cccc0003")
    assert bug_state([*rows[:18], never]).verdict is Verdict.REPRODUCES, "it may need the other GPU"
    assert bug_state([*rows, row(9 + ABSENT.days, 0, 1)]).verdict is Verdict.FIXED, (
        "the other host is gone"
    )


def test_a_flaky_bug_is_no_change_night_after_night() -> None:
    rows = [row(night, night % 2, 1) for night in range(1, 40)]
    assert set(verdicts(rows)) == {"reproduces"}
    needed = bug_state(rows).needed
    assert needed is not None
    quiet = [row(40 + night, 0, 1) for night in range(needed)]
    assert bug_state([*rows, *quiet[:-1]]).verdict is Verdict.REPRODUCES
    assert bug_state([*rows, *quiet]).verdict is Verdict.FIXED


@given(st.lists(st.booleans(), min_size=2, max_size=40))
def test_the_quick_bound_never_hides_a_fix(crashes: list[bool]) -> None:
    rows = [row(night, int(crashed), 1) for night, crashed in enumerate([True, *crashes])]
    for last in range(1, len(rows)):
        state = bug_state(rows[: last + 1])
        assert state.verdict is Verdict.FIXED or state.streak < (state.needed or 0)
        if state.verdict is Verdict.FIXED:
            break


def test_what_a_bug_does_that_kills_nothing() -> None:
    _, run = row(0, 2, 2)
    hung = replace(run, arms=(arm(2, 2, expected=Expected.HANGS),))
    assert bug_state([(FIRST, hung)]).reason.startswith("hung in 2 of 2 boots, last in ")
