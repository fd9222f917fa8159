from __future__ import annotations

import random
from dataclasses import replace
from datetime import date, timedelta
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.history.made import FIRST, measured
from vllm_repro.history.rows import RunRow
from vllm_repro.history.trend import IN_A_ROW, LEAST_REFERENCE, Direction, Trends, trends

Rows = list[tuple[date, RunRow]]


def nights(speeds: list[float], **more: str) -> Rows:
    return [measured(night, {"eager": speed}, **more) for night, speed in enumerate(speeds)]


def steady(count: int, seed: int | str = 1, noise: float = 0.01) -> list[float]:
    draw = random.Random(seed)
    return [1000 * (1 + draw.uniform(-noise, noise)) for _ in range(count)]


def test_the_third_night_in_a_row_is_a_change_and_the_second_is_not() -> None:
    speeds = steady(30)
    for count in range(IN_A_ROW):
        assert not trends(nights([*speeds, *[910.0] * count])).changes
    (change,) = trends(nights([*speeds, 910.0, 912.0, 908.0])).changes
    assert change.direction is Direction.SLOWER
    assert (change.since, change.called) == (FIRST + timedelta(days=30), FIRST + timedelta(days=32))
    assert 0.90 < change.ratio < 0.92
    assert change.low < change.reference < change.high
    assert change.nights == 28


def test_two_sides_and_a_night_between_are_no_row() -> None:
    speeds = steady(30)
    assert not trends(nights([*speeds, 900.0, 1100.0, 900.0, 1100.0])).changes
    assert not trends(nights([*speeds, 900.0, 900.0, 1000.0, 900.0, 900.0])).changes


def test_a_night_without_a_measurement_neither_adds_nor_ends() -> None:
    rows = nights([*steady(30), 900.0, 900.0, 900.0, 900.0])
    assert len(trends([*rows[:31], *rows[32:]]).changes) == 1
    assert not trends([*rows[:31], rows[33]]).changes


def test_nights_that_were_outside_before_ask_for_a_longer_row() -> None:
    speeds = steady(30)
    speeds[20] = speeds[25] = 900.0
    assert not trends(nights([*speeds, *[900.0] * (IN_A_ROW + 1)])).changes
    assert len(trends(nights([*speeds, *[900.0] * (IN_A_ROW + 2)])).changes) == 1


def test_the_level_that_was_called_is_the_next_reference() -> None:
    speeds = [*steady(30), *(0.9 * speed for speed in steady(30, 2))]
    assert len(trends(nights(speeds)).changes) == 1
    back = [*speeds, *steady(5, 3)]
    assert [change.direction for change in trends(nights(back)).changes] == [Direction.SLOWER, Direction.FASTER]


def test_the_same_release_on_both_sides_is_said() -> None:
    speeds = [*steady(30), 900.0, 900.0, 900.0]
    assert not trends(nights(speeds)).changes[0].same_vllm
    assert trends(nights(speeds, version="0.24.0")).changes[0].same_vllm


def test_two_nights_of_which_no_version_is_known_are_not_of_the_same() -> None:
    rows = [(night, replace(made, version=None)) for night, made in nights([*steady(30), 900.0, 900.0, 900.0])]
    assert not trends(rows).changes[0].same_vllm


def test_a_second_loss_weeks_later_is_a_call_of_its_own() -> None:
    speeds = [*steady(30), *(0.9 * speed for speed in steady(40, 2)), *(0.8 * speed for speed in steady(5, 3))]
    calls = trends(nights(speeds)).calls
    assert [(call.direction, call.since) for call in calls] == [
        (Direction.SLOWER, FIRST + timedelta(days=30)),
        (Direction.SLOWER, FIRST + timedelta(days=70)),
    ]


def test_only_the_rate_of_tokens_is_judged() -> None:
    rows = []
    for night, made in nights([*steady(30), 900.0, 900.0, 900.0]):
        arms = tuple(
            replace(arm, figures=tuple(replace(one, quantity="ttft_s") for one in arm.figures or ()))
            for arm in made.arms
        )
        rows.append((night, replace(made, arms=arms)))
    assert not trends(rows).series


def several(
    factor: dict[tuple[str, str], float], hosts: tuple[str, ...], scenarios: tuple[str, ...], since: int
) -> Trends:
    """40 nights; from `since` on each (host, scenario) is so much faster."""
    rows: Rows = []
    for host in hosts:
        for scenario in scenarios:
            arms = {name: steady(40, f"{host} {scenario} {name}") for name in ("reported", "eager")}
            for night in range(40):
                times = factor.get((host, scenario), 1.0) if night >= since else 1.0
                speeds = {name: times * those[night] for name, those in arms.items()}
                rows.append(measured(night, speeds, host=host, scenario=scenario))
    return trends(rows)


A, B = "aaaa0001", "bbbb0002"


def test_a_host_on_which_everything_moved_is_named_and_no_arm() -> None:
    found = several({(A, name): 0.85 for name in "xyz"}, (A, B), ("x", "y", "z"), 30)
    assert not found.changes
    (suspect,) = found.suspects
    assert (suspect.host, suspect.direction, suspect.since, suspect.alone) == (
        A,
        Direction.SLOWER,
        FIRST + timedelta(days=30),
        False,
    )
    assert 0.83 < suspect.ratio < 0.87
    assert suspect.last == FIRST + timedelta(days=39)


def test_a_lone_host_is_named_with_that_there_is_none_to_compare_with() -> None:
    found = several({(A, name): 0.85 for name in "xyz"}, (A,), ("x", "y", "z"), 30)
    assert not found.changes
    assert found.suspects[0].alone


def test_what_moved_on_every_host_is_called() -> None:
    found = several({(host, name): 0.85 for host in (A, B) for name in "xyz"}, (A, B), ("x", "y", "z"), 30)
    assert not found.suspects
    assert {(call.scenario, call.arm) for call in found.calls} == {
        (name, arm) for name in "xyz" for arm in ("reported", "eager")
    }
    assert all(call.hosts == (A, B) for call in found.calls)


def test_one_scenario_of_a_slow_one_is_no_slow_host() -> None:
    found = several({(A, "x"): 0.85, (B, "x"): 0.85}, (A, B), ("x", "y", "z"), 30)
    assert not found.suspects
    assert {call.scenario for call in found.calls} == {"x"}


def test_a_loss_is_called_on_a_slow_host_too() -> None:
    factor = {(A, name): 0.85 for name in "yz"} | {(A, "x"): 0.85 * 0.9, (B, "x"): 0.9}
    found = several(factor, (A, B), ("x", "y", "z"), 30)
    assert {call.scenario for call in found.calls} == {"x"}
    assert [suspect.host for suspect in found.suspects] == [A]
    assert {change.series.host: change.relative for change in found.changes} == {A: True, B: False}


def test_what_its_twin_does_not_show_is_no_call() -> None:
    found = several({(A, "x"): 0.9}, (A, B), ("x", "y", "z"), 30)
    assert not found.calls
    assert {change.series.host for change in found.lone} == {A}


def test_a_twin_that_was_hardly_measured_in_those_nights_does_not_speak_against_a_call() -> None:
    rows = [
        measured(night, {"eager": speed}, host=host) for host in (A, B) for night, speed in enumerate(steady(30, host))
    ]
    rows += [measured(30 + night, {"eager": 900.0}, host=A) for night in range(IN_A_ROW)]
    for of_twin in ([], [measured(31, {"eager": 1000.0}, host=B)]):
        found = trends([*rows, *of_twin])
        assert (len(found.calls), found.lone) == (1, ())
    both = [measured(night, {"eager": 1000.0}, host=B) for night in (30, 31)]
    assert (trends([*rows, *both]).calls, len(trends([*rows, *both]).lone)) == ((), 1)


def test_a_host_that_goes_to_and_fro_is_not_blamed() -> None:
    rows: Rows = []
    for scenario in "xyz":
        for host in (A, B):
            for night, speed in enumerate(steady(40, f"{host} {scenario}")):
                moved = (0.85 if night % 2 else 1.15) if host == A and night >= 34 else 1.0
                rows.append(measured(night, {"eager": moved * speed}, host=host, scenario=scenario))
    assert not trends(rows).suspects


def test_no_figure_but_a_gpu_counts() -> None:
    rows = nights([*steady(30), 900.0, 900.0, 900.0])
    for evidence in ("lab", "rehearsal", "cpu"):
        found = trends([(night, replace(made, evidence=evidence)) for night, made in rows])
        assert not found.series
        assert not found.changes


@settings(max_examples=50)
@given(st.lists(st.floats(500, 2000), max_size=50), st.floats(0.1, 10))
def test_a_change_has_its_nights_outside_and_scales(speeds: list[float], factor: float) -> None:
    found = trends(nights(speeds))
    for change in found.changes:
        row = [seen for seen in found.series[change.series] if change.since <= seen.night <= change.called]
        assert len(row) >= IN_A_ROW
        assert all(
            seen.median < change.low if change.direction is Direction.SLOWER else seen.median > change.high
            for seen in row
        )
        assert sum(seen.night < change.since for seen in found.series[change.series]) >= min(
            change.nights, LEAST_REFERENCE
        )
    assert all(one.called < other.called for one, other in pairwise(found.changes))
    # Whether it is a change does not depend on the unit.
    again = trends(nights([factor * speed for speed in speeds]))
    assert [change.called for change in again.changes] == [change.called for change in found.changes]
