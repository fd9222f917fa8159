from __future__ import annotations

import random
from datetime import date, timedelta

import pytest
from msgspec.structs import replace

from tests.nights.made import FIRST, measured
from tests.nights.simulated import LOSSY, Weeks
from vllm_repro.report.runs import Run
from vllm_repro_nights.nights import night_of
from vllm_repro_nights.setups import setup_of
from vllm_repro_nights.throughput import IN_A_ROW, LEAST_REFERENCE, Change, Direction, newest, throughput

Rows = list[tuple[date, Run]]


def nights(speeds: list[float], **more: str) -> Rows:
    return [measured(night, {"eager": speed}, **more) for night, speed in enumerate(speeds)]


def changes(rows: Rows) -> list[Change]:
    return [change for one in throughput(rows) for change in one.changes]


def steady(count: int, seed: int = 1, noise: float = 0.01) -> list[float]:
    draw = random.Random(seed)
    return [1000 * (1 + draw.uniform(-noise, noise)) for _ in range(count)]


@pytest.mark.parametrize(("level", "direction"), [(910.0, Direction.SLOWER), (1090.0, Direction.FASTER)])
def test_the_third_night_in_a_row_is_a_change_and_the_second_is_not(level: float, direction: Direction) -> None:
    speeds = steady(30)
    for count in range(IN_A_ROW):
        assert not changes(nights([*speeds, *[level] * count]))
    (change,) = changes(nights([*speeds, *[level] * IN_A_ROW]))
    assert change.direction is direction
    assert (change.since, change.called) == (FIRST + timedelta(days=30), FIRST + timedelta(days=32))
    assert change.ratio == pytest.approx(level / 1000, abs=0.01)
    assert change.low < change.reference < change.high
    assert change.nights == 28


def test_nights_on_two_sides_or_with_one_between_are_no_change() -> None:
    speeds = steady(30)
    assert not changes(nights([*speeds, 900.0, 1100.0, 900.0, 1100.0]))
    assert not changes(nights([*speeds, 900.0, 900.0, 1000.0, 900.0, 900.0]))


def test_a_night_without_a_measurement_does_not_break_a_row() -> None:
    rows = nights([*steady(30), 900.0, 900.0, 900.0, 900.0])
    assert len(changes([*rows[:31], *rows[32:]])) == 1
    assert not changes([*rows[:31], rows[33]])


def test_a_level_is_called_once_and_is_then_the_reference() -> None:
    slower = [0.9 * speed for speed in steady(60, 2)]
    assert len(changes(nights([*steady(30), *slower]))) == 1
    back = changes(nights([*steady(30), *slower, *steady(5, 3)]))
    assert [change.direction for change in back] == [Direction.SLOWER, Direction.FASTER]


def test_a_reference_needs_enough_nights() -> None:
    for count, called in ((LEAST_REFERENCE - 1, 0), (LEAST_REFERENCE, 1)):
        assert len(changes(nights([*steady(count), 800.0, 800.0, 800.0]))) == called


def test_noise_widens_the_limits_from_three_percent() -> None:
    assert not changes(nights([*steady(30, noise=0.001), *[975.0] * 4]))
    assert changes(nights([*steady(30), *[940.0] * 3]))
    assert not changes(nights([*steady(30, noise=0.1), *[940.0] * 3]))


def test_only_gpu_runs_of_equal_flags_are_compared() -> None:
    rows = nights([*steady(30), 800.0, 800.0, 800.0])
    lab = [(night, replace(one, evidence="lab")) for night, one in rows]
    assert not throughput(lab)
    edited = [
        (
            night,
            replace(one, arms=tuple(replace(arm, command="vllm serve --other") for arm in one.arms))
            if night > FIRST + timedelta(29)
            else one,
        )
        for night, one in rows
    ]
    assert not changes(edited)
    (shown,) = newest(throughput(edited))
    assert shown.setup == setup_of(edited[-1][1].arms[0])


def test_simulated_weeks_have_one_loss_and_nothing_else() -> None:
    for seed in range(5):
        weeks = Weeks(seed)
        series = throughput([(night_of(one.started_at, None), one) for one in weeks.rows()])
        changed = [one for one in series if one.changes]
        assert {(one.scenario, one.arm) for one in changed} == {(LOSSY, "eager")}
        assert {one.host for one in changed} == {"a1b2c3d4", "c3d4e5f6"}
        assert all(change.called <= FIRST + timedelta(days=weeks.loss + 5) for one in changed for change in one.changes)
