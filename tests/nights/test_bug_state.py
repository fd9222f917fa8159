from __future__ import annotations

from collections.abc import Sequence
from datetime import date, timedelta
from itertools import permutations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.nights.made import NIGHTLY, RELEASE, arm, row
from vllm_repro.report.runs import Run
from vllm_repro.verdict.statistics import clean_needed, clean_streak, lower_bound
from vllm_repro.verdict.verdict import Expected, Standing
from vllm_repro_nights.bug_state import ABSENT, SETTLED, BugHistory, BugState, bug_histories
from vllm_repro_nights.text import state_text

Rows = Sequence[tuple[date, Run]]


def history_of(rows: Rows) -> BugHistory:
    (found,) = bug_histories(rows)
    return found


def moves(rows: Rows) -> list[BugState]:
    return [step.state for step in history_of(rows).steps]


def test_a_whole_life() -> None:
    rows = [row(night, 5, 5) for night in range(2)]
    assert history_of(rows).state is BugState.REPRODUCES
    rows += [row(2, 0, 1)]
    assert history_of(rows).state is BugState.CANDIDATE
    assert (
        "1 quiet with the trigger crossed, after it died in 10 of 10 boots: 6 are needed"
        in history_of(rows).steps[-1].why
    )
    rows += [row(3, 0, 5)]
    assert history_of(rows).state is BugState.GOOD_NIGHTLY
    rows += [row(4, 5, 5, version=RELEASE.format(0))]
    assert history_of(rows).state is BugState.GOOD_NIGHTLY, "no release has it yet"
    rows += [row(5, 0, 9, version=RELEASE.format(1))]
    assert history_of(rows).state is BugState.GOOD_RELEASE
    for night in range(SETTLED - 1):
        assert history_of(rows).state is BugState.GOOD_RELEASE
        rows += [row(6 + night, 0, 1, version=RELEASE.format(1))]
    assert history_of(rows).state is BugState.CLOSED
    assert history_of(rows).steps[-1].why == f"good releases were quiet in {SETTLED} nights"
    rows += [row(20, 1, 2)]
    assert history_of(rows).state is BugState.REGRESSED
    assert "where it was good" in history_of(rows).steps[-1].why
    assert (history_of(rows).crashed, history_of(rows).boots) == (1, 2), (
        "what was before the fix says nothing of how often it dies now"
    )
    rows += [row(21, 2, 2), row(22, 0, 30)]
    assert history_of(rows).as_of(rows[0][0] - timedelta(days=1)) is BugState.OPEN
    assert moves(rows) == [
        BugState.REPRODUCES,
        BugState.CANDIDATE,
        BugState.GOOD_NIGHTLY,
        BugState.GOOD_RELEASE,
        BugState.CLOSED,
        BugState.REGRESSED,
        BugState.CLOSED,
    ]
    assert "30 quiet with the trigger crossed" in history_of(rows).steps[-1].why


def test_what_is_declared_good_and_lives_is_closed_and_its_death_is_a_regression() -> None:
    rows = [row(0, 0, 1, standing=Standing.GOOD, version="0.25.0")]
    assert history_of(rows).state is BugState.CLOSED
    assert history_of(rows).steps[-1].why == "0.25.0 is declared good, and lived"
    rows += [row(1, 1, 1, standing=Standing.GOOD, version="0.25.0")]
    assert history_of(rows).state is BugState.REGRESSED


def test_a_death_of_an_old_release_is_no_regression_of_a_newer_one() -> None:
    rows = [row(0, 5, 5, version="0.23.0"), row(1, 0, 9, version="0.24.0")]
    assert history_of(rows).state is BugState.GOOD_RELEASE
    # A version map of the next night.
    later = [row(2, 5, 5, version="0.22.0"), row(2, 0, 1, version="0.20.0", hour=3)]
    assert history_of([*rows, *later]).state is BugState.GOOD_RELEASE
    assert (history_of([*rows, *later]).crashed, history_of([*rows, *later]).boots) == (10, 10)
    assert history_of([*rows, *later, row(3, 1, 1, version="0.25.0")]).state is BugState.REGRESSED


def test_a_death_of_an_old_release_counts_when_a_newer_one_lived_before() -> None:
    rows = [row(0, 0, 9, version="0.24.0"), row(1, 5, 5, version="0.23.0")]
    assert moves(rows) == [BugState.GOOD_RELEASE]
    assert state_text(history_of(rows)) == "died in 5 of 5 boots until then; 9 quiet in a row made it a fix"


def test_boots_of_one_release_are_one_sample() -> None:
    """A release does not change: after a death, its own quiet boots are luck and no fix."""
    rows = [row(0, 1, 1, version="0.24.0"), row(1, 0, 100, version="0.24.0")]
    for boots in (rows, [row(0, 0, 100, version="0.24.0"), row(1, 1, 1, version="0.24.0")]):
        assert (history_of(boots).state, history_of(boots).flaky) == (BugState.REPRODUCES, True)


@pytest.mark.parametrize("order", list(permutations((0, 1, 2))))
def test_a_bisection_of_a_declared_fix_leaves_the_bug_closed(order: tuple[int, ...]) -> None:
    """One boot of a release before the bug, one with it, and one after the fix."""
    boots = (("0.19.0", 0, Standing.UNKNOWN), ("0.23.0", 1, Standing.BAD), ("0.33.0", 0, Standing.GOOD))
    rows = []
    for night, which in enumerate(order):
        version, crashed, standing = boots[which]
        rows.append(row(night, crashed, 1, version=version, standing=standing))
    assert history_of(rows).state is BugState.CLOSED
    assert state_text(history_of(rows)) == "declared good, and the newest release lived"
    assert history_of([*rows, row(3, 1, 1, version="0.33.0", standing=Standing.GOOD)]).state is BugState.REGRESSED


def test_quiet_nights_before_a_release_was_good_do_not_close_the_bug() -> None:
    rows = [row(night, 0, 1, version="0.20.0", standing=Standing.BAD) for night in range(SETTLED - 1)]
    rows += [row(SETTLED, 0, 1, version="0.25.0", standing=Standing.GOOD)]
    assert history_of(rows).steps[-1].why == "0.25.0 is declared good, and lived"


def test_a_declared_bug_after_releases_that_are_declared_good_is_no_regression() -> None:
    rows = [
        row(0, 0, 1, version="0.18.0", standing=Standing.GOOD),
        row(1, 1, 1, version="0.23.0", standing=Standing.BAD),
    ]
    assert moves(rows) == [BugState.CLOSED, BugState.REPRODUCES]


_VERSIONS = ("0.22.0", "0.23.0", "0.24.0", "0.25.0", NIGHTLY.format(1), NIGHTLY.format(2))


@given(
    st.lists(st.tuples(st.sampled_from(_VERSIONS), st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=12),
    st.dictionaries(st.sampled_from(_VERSIONS), st.sampled_from(Standing)),
    st.randoms(use_true_random=False),
)
def test_the_order_of_runs_changes_nothing(
    runs: list[tuple[str, int, int]], standings: dict[str, Standing], shuffle: Random
) -> None:
    def made(runs: list[tuple[str, int, int]]) -> BugHistory:
        return history_of(
            [
                row(
                    night,
                    min(crashed, boots),
                    boots,
                    version=version,
                    standing=standings.get(version, Standing.UNKNOWN),
                )
                for night, (version, crashed, boots) in enumerate(runs)
            ]
        )

    again = list(runs)
    shuffle.shuffle(again)
    then, now = made(again), made(runs)
    assert (then.state, then.crashed, then.boots, then.streak) == (now.state, now.crashed, now.boots, now.streak)


@given(
    st.dictionaries(st.sampled_from(("0.21.0", "0.22.0", "0.23.0", "0.24.0")), st.booleans()),
    st.integers(1, 12),
    st.sampled_from(("0.20.0", "0.23.0")),
)
def test_a_later_crash_of_an_older_release_does_not_make_a_newer_one_regressed(
    died: dict[str, bool], quiet: int, old: str
) -> None:
    rows = [row(0, 5 * dies, 5, version=version) for version, dies in died.items() if version != old]
    rows += [row(1, 0, quiet, version="0.25.0"), row(2, 5, 5, version=old)]
    assert history_of(rows).state is not BugState.REGRESSED


def test_what_decides_nothing_moves_nothing() -> None:
    rows = [row(0, 3, 3), row(1, 0, 0), row(2, 0, 0)]
    assert moves(rows) == [BugState.REPRODUCES]
    assert history_of([row(0, 0, 0)]).state is BugState.OPEN
    assert history_of([row(0, 0, 3)]).state is BugState.OPEN, "quiet, and nothing to compare with"


def test_a_host_that_never_had_it_is_no_proof_of_a_fix() -> None:
    rows = [pair for night in range(10) for pair in (row(night, 1, 1), row(night, 0, 5, host="bbbb0002"))]
    assert moves(rows) == [BugState.REPRODUCES]
    # The host that had it holds the scenario back until its own boots are enough, or it is gone.
    rows += [row(10, 0, 50, host="bbbb0002")]
    assert history_of(rows).state is BugState.REPRODUCES
    assert history_of([*rows, row(11, 0, 6)]).state is BugState.GOOD_NIGHTLY


def test_a_scenario_is_where_its_worst_host_is() -> None:
    rows = [pair for night in range(9) for pair in (row(night, 1, 1), row(night, 2, 2, host="bbbb0002"))]
    rows += [row(9, 0, 50)]
    assert history_of(rows).state is BugState.REPRODUCES
    assert (history_of(rows).crashed, history_of(rows).boots) == (18, 18)
    assert history_of([*rows, row(10, 0, 50, host="bbbb0002")]).state is BugState.GOOD_NIGHTLY


def test_of_two_hosts_alike_the_one_with_most_boots_is_told() -> None:
    rows = [row(0, 1, 1), row(0, 5, 5, host="bbbb0002"), row(0, 2, 2, host="cccc0003")]
    assert (history_of(rows).crashed, history_of(rows).boots) == (5, 5)


def test_a_host_that_is_gone_holds_nothing_back() -> None:
    rows = [pair for night in range(5) for pair in (row(night, 5, 5), row(night, 5, 5, host="bbbb0002"))]
    absent = ABSENT.days
    assert history_of([*rows, row(4 + absent, 0, 50)]).state is BugState.REPRODUCES
    assert history_of([*rows, row(5 + absent, 0, 50)]).state is BugState.GOOD_NIGHTLY


def test_that_one_host_never_saw_it_does_not_close_it_for_another() -> None:
    rows = [
        row(0, 5, 5),
        row(1, 0, 9, version=RELEASE.format(9)),
        row(2, 0, 1, version=RELEASE.format(9), host="bbbb0002", standing=Standing.GOOD),
    ]
    assert history_of(rows[:1] + rows[2:]).state is BugState.REPRODUCES
    assert history_of(rows[2:]).state is BugState.CLOSED


def test_a_flaky_bug_is_no_change_night_after_night() -> None:
    rows = [row(night, night % 2, 1) for night in range(1, 40)]
    assert moves(rows) == [BugState.REPRODUCES, BugState.CANDIDATE, BugState.REPRODUCES]
    assert history_of(rows).flaky
    needed = history_of(rows).needed
    assert needed is not None
    quiet = [row(40 + night, 0, 1) for night in range(needed)]
    assert history_of([*rows, *quiet[:-1]]).state is BugState.REPRODUCES
    assert history_of([*rows, *quiet]).state is BugState.GOOD_NIGHTLY


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from("ab")), max_size=30),
    st.randoms(use_true_random=False),
)
def test_a_life_follows_from_the_rows_alone(nights: list[tuple[int, int, str]], shuffle: Random) -> None:
    rows = [
        row(night, min(crashed, boots), boots, host=f"{host}aaa0001")
        for night, (crashed, boots, host) in enumerate(nights)
    ]
    again = list(rows)
    shuffle.shuffle(again)
    assert bug_histories(again) == bug_histories(rows)
    for found in bug_histories(rows):
        states = [BugState.OPEN, *(step.state for step in found.steps)]
        assert states[-1] is found.state
        assert all(
            step.was is before and step.state is not before for step, before in zip(found.steps, states, strict=False)
        )
        assert [step.night for step in found.steps] == sorted(step.night for step in found.steps)
        assert 0 <= found.crashed <= found.boots
        died = sum(made.died is not None for _, made in rows)
        # No fix, and nothing that leads to one, without a death before it.
        if not died:
            assert found.state is BugState.OPEN
        good = next((step for step in found.steps if step.state.good), None)
        if good is not None:
            assert any(made.died for night, made in rows if night < good.night)


@given(st.integers(1, 40), st.integers(0, 40))
def test_watching_asks_for_more_boots_than_one_comparison(crashed: int, quiet: int) -> None:
    once, watching = clean_needed(crashed, crashed + quiet), clean_streak(crashed, crashed + quiet)
    assert once is not None
    assert watching is not None
    assert watching >= once
    rate = lower_bound(crashed, crashed + quiet)
    assert (1 - rate) ** watching * crashed * (crashed + 1) <= 0.05 * (1 + 1e-6)
    assert clean_streak(0, quiet) is None


@pytest.mark.parametrize(("crashed", "boots", "needed"), [(1, 1, 72), (5, 5, 9), (30, 30, 5), (35, 70, 21)])
def test_how_many_quiet_boots_in_a_row(crashed: int, boots: int, needed: int) -> None:
    assert clean_streak(crashed, boots) == needed


@pytest.mark.parametrize(("expected", "did"), [(Expected.HANGS, "hung"), (Expected.ERRS, "answered wrongly")])
def test_what_a_bug_does_that_kills_nothing(expected: Expected, did: str) -> None:
    rows = [(night, replace(one, arms=(arm(2, 2, expected=expected),))) for night, one in (row(0, 2, 2), row(1, 2, 2))]
    found = history_of([*rows, row(2, 0, 1)])
    assert found.steps[0].why.startswith(f"{did} in 2 of 2 boots with ")
    assert f"after it {did} in 4 of 4 boots: " in found.steps[1].why
    assert state_text(found).startswith(f"{did} in 4 of 4 boots; 1 quiet since")


@settings(max_examples=30)
@given(st.lists(st.booleans(), min_size=2, max_size=60))
def test_the_quick_bound_never_hides_a_fix(crashes: list[bool]) -> None:
    rows = [row(night, int(crashed), 1) for night, crashed in enumerate([True, *crashes])]
    for last in range(1, len(rows)):
        found = history_of(rows[: last + 1])
        if not found.state.good and found.needed is not None:
            assert found.streak < found.needed
