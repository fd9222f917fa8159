from __future__ import annotations

import random
from dataclasses import replace
from math import exp
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro.verdict.throughput import (
    MOST_CPU,
    MOST_OFF,
    TICK,
    ClientCost,
    Figures,
    Load,
    Point,
    Round,
    Spread,
    ThroughputChange,
    Timing,
    drifted,
    figures,
    interval,
    label_of,
    ratio,
    round_of,
    unsteady,
    usual_load,
    withheld,
)

POINT = Point(128, 512, 1)


def at(speed: float) -> Round:
    """Return a round with this many output tokens per second."""
    return Round(
        wall_s=512 / speed,
        requests=1,
        prompt_tokens=128,
        output_tokens=512,
        output_tok_s=speed,
        req_s=speed / 512,
        ttft_s=0.05,
        tpot_s=1 / speed,
        itl_s=1 / speed,
        itl_p99_s=2 / speed,
    )


def answer(sent: float, ended: float, chunks: tuple[float, ...], tokens: int) -> Timing:
    return Timing(sent=sent, ended=ended, chunks=chunks, prompt_tokens=10, output_tokens=tokens)


def boots(*speeds: tuple[float, ...]) -> list[list[Round]]:
    return [[at(speed) for speed in boot] for boot in speeds]


def approx(*figures: float | None) -> Any:
    return pytest.approx(figures)


def test_a_round_by_hand() -> None:
    # Two requests of three tokens: sent at 0.0 and 0.1, answered at 0.5, 0.7, 1.0 and at 0.6, 0.7,
    # 2.1.
    first = answer(0.0, 1.1, (0.5, 0.7, 1.0), 3)
    second = answer(0.1, 2.1, (0.6, 0.7, 2.0), 3)
    found = round_of([first, second], ClientCost(cpu=0.5, late_s=0.25, slept_s=0.3))
    assert (found.cpu, found.late_s, found.slept_s, found.wall_s) == (0.5, 0.25, 0.3, 2.1)
    assert (found.requests, found.prompt_tokens, found.output_tokens) == (2, 20, 6)
    assert (found.output_tok_s, found.req_s) == approx(6 / 2.1, 2 / 2.1)
    assert (found.ttft_s, found.e2e_s) == approx(0.5, (1.1 + 2.0) / 2)
    assert (found.tpot_s, found.itl_s) == approx((0.25 + 0.7) / 2, (0.2 + 0.3) / 2)
    assert found.itl_p99_s == pytest.approx(1.3)


def test_several_tokens_a_piece_are_counted_by_usage() -> None:
    """Speculative decoding: four tokens arrive in two pieces, half a second apart."""
    found = round_of([answer(0.0, 1.0, (0.5, 1.0), 4)])
    assert (found.tpot_s, found.itl_s) == approx(0.5 / 3, 0.5)
    assert round_of([answer(0.0, 1.0, (1.0,), 4)]).itl_s is None


def test_a_round_of_two_tokens_on_a_late_clock() -> None:
    found = round_of([answer(5.0, 7.0, (6.0, 6.5), 2)])
    assert (found.wall_s, found.tpot_s, found.e2e_s) == (2.0, 0.5, 2.0)
    assert (found.cpu, found.late_s, found.slept_s) == (0.0, 0.0, 0.0)


def through(stalls: list[tuple[float, float]], moment: float) -> float:
    """Return when an event loop with these stalls does what is due at a moment."""
    return next((end for begin, end in stalls if begin <= moment < end), moment)


def latest(stalls: list[tuple[float, float]], ends: float) -> float:
    """Return the most by which a tick of that loop is late."""
    worst = woke = 0.0
    while woke < ends:
        due = woke + TICK
        woke = through(stalls, due)
        worst = max(worst, woke - due)
    return worst


@given(
    sent=st.floats(0.0005, 0.003),
    wall=st.floats(0.1, 3.0),
    at=st.lists(
        st.tuples(st.sampled_from(["first", "middle", "last"]), st.floats(0.0, 1.0)), max_size=3
    ),
    lengths=st.lists(st.floats(0.0, 0.08), min_size=3, max_size=3),
    stamped=st.booleans(),
)
@settings(max_examples=800)
def test_a_rate_is_right_or_its_round_does_not_count(
    sent: float, wall: float, at: list[tuple[str, float]], lengths: list[float], stamped: bool
) -> None:
    """Stall the client where it falsifies most: after the first stamp and at the last token."""
    moments = {"first": sent, "middle": sent + wall / 2, "last": sent + wall}
    placed = sorted(
        (moments[where] - share * length, length)
        for (where, share), length in zip(at, lengths, strict=False)
    )
    stalls: list[tuple[float, float]] = []
    for begin, length in placed:
        begin = max(begin, stalls[-1][1] if stalls else 0.0)
        stalls.append((begin, begin + length))
    true_begin, true_end = through(stalls, sent), sent + wall
    read = through(stalls, true_end)
    queued = sum(end - begin for begin, end in stalls)
    cost = ClientCost(queued_s=queued, late_s=latest(stalls, read))
    timing = answer(sent, read, (sent + wall / 2, read), 100)
    if stamped:
        timing = replace(
            answer(sent, true_end, (sent + wall / 2, true_end), 100), written=true_begin
        )
    found = round_of([timing], cost)
    off = found.output_tok_s / (100 / (true_end - true_begin)) - 1
    assert abs(off) <= MOST_OFF / (1 - MOST_OFF) or found.late, (off, found.edge_s)
    if not stalls or (stamped and true_begin == sent):
        assert not found.late


@pytest.mark.parametrize(
    ("written", "edge_s"),
    [((0.0, 0.1), 0.0), ((0.009, 0.1), 0.009), ((0.011, 0.1), 0.011), ((0.0, None), 0.064)],
)
def test_without_stamps_each_stall_falsifies_a_rate(
    written: tuple[float | None, ...], edge_s: float
) -> None:
    """With stamps of the kernel only a late first write does."""
    timings = [
        replace(answer(0.0, 1.0, (0.5, 1.0), 9), written=written[0]),
        replace(answer(0.1, 1.0, (0.5,), 9), written=written[1]),
    ]
    found = round_of(timings, ClientCost(late_s=0.03, queued_s=0.06))
    assert found.edge_s == pytest.approx(edge_s)
    assert (bool(found.late), found.limited) == (edge_s > 0.01, "")


@pytest.mark.parametrize(
    ("wall", "queued", "late"), [(0.1, 0.0015, True), (1.0, 0.0015, False), (1.0, 0.5, False)]
)
def test_a_wait_that_no_tick_saw_falsifies_a_short_round(
    wall: float, queued: float, late: bool
) -> None:
    found = round_of([answer(0.0, wall, (wall / 2, wall), 9)], ClientCost(queued_s=queued))
    assert bool(found.late) is late


@pytest.mark.parametrize(
    ("cpu", "queued", "limited"),
    [
        (
            0.5,
            0.45,
            (
                "the client used 50 % of a core and waited for one in 45 % of the"
                " time, so it may have"
                " been the limit"
            ),
        ),
        (0.5, 0.35, ""),
        (0.91, 0.0, "the client used 91 % of a core, so it may have been the limit"),
        (0.9, 0.0, ""),
        (0.85, 1 - MOST_CPU, "the client used 85 % of a core, so it may have been the limit"),
        (
            0.2,
            0.8,
            (
                "the client used 20 % of a core and waited for one in 80 % of the time,"
                " so it may have been the limit"
            ),
        ),
    ],
)
def test_a_client_that_waits_for_its_core_may_be_the_limit(
    cpu: float, queued: float, limited: str
) -> None:
    """Another process takes half of the core: a client that needs all of it uses half."""
    assert replace(at(256.0), cpu=cpu, queued_s=2 * queued).limited == limited


@pytest.mark.parametrize(
    ("edge_s", "late"),
    [
        (0.02, ""),
        (0.4, "the client was late by up to 400.0 ms at the ends of a round of 2 s"),
    ],
)
def test_a_late_client_is_told_in_milliseconds(edge_s: float, late: str) -> None:
    assert replace(at(256.0), edge_s=edge_s).late == late


@pytest.mark.parametrize(
    ("warm_ups", "apart"),
    [
        ([], 1.0),
        ([9.0], 1.0),
        ([50.0, 100.0], 0.5),
        ([100.0, 50.0], 0.5),
        ([1.0, 80.0, 100.0], 0.2),
        ([200.0, 80.0, 100.0], 0.2),
    ],
)
def test_a_load_is_steady_once_two_rounds_agree(warm_ups: list[float], apart: float) -> None:
    assert unsteady(warm_ups) == pytest.approx(apart)


@pytest.mark.parametrize("timings", [[], [answer(0.0, 1.0, (), 2)], [answer(0.0, 1.0, (0.5,), 1)]])
def test_a_round_without_answers_is_none(timings: list[Timing]) -> None:
    with pytest.raises(ValueError, match="two tokens or more"):
        round_of(timings)


@pytest.mark.parametrize(
    ("values", "spread"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0], (3.0, 2.0, 4.0, 0.527, 5)),
        ([7.0], (7.0, 7.0, 7.0, 0.0, 1)),
        ([1.0, 3.0], (2.0, 1.5, 2.5, 0.707, 2)),
        ([0.0, 0.0], (0.0, 0.0, 0.0, 0.0, 2)),
    ],
)
def test_quartiles_of_known_values(values: list[float], spread: tuple[float, ...]) -> None:
    found = Spread.of(values)
    figures = (found.median, found.low, found.high, found.cv, found.n)
    assert figures == pytest.approx(spread, abs=0.001)


def test_figures_are_over_all_rounds_of_all_boots() -> None:
    speeds = [100.0, 110.0, 120.0, 130.0, 140.0]
    assert figures(POINT, boots((100.0, 110.0, 120.0), (130.0, 140.0))) == Figures(
        point=POINT,
        boots=2,
        output_tok_s=Spread.of(speeds),
        req_s=Spread.of([speed / 512 for speed in speeds]),
        ttft_s=Spread.of([0.05] * 5),
        tpot_s=Spread.of([1 / speed for speed in speeds]),
        itl_s=Spread.of([1 / speed for speed in speeds]),
        itl_p99_s=Spread.of([2 / speed for speed in speeds]),
        e2e_s=None,
        cpu=Spread.of([0.0] * 5),
        late_s=Spread.of([0.0] * 5),
    )


@pytest.mark.parametrize(
    ("share", "rounds", "median", "percentile"),
    [
        (0.2, 5, False, False),
        (0.11, 3, False, False),
        (0.11, 2, True, True),
        (0.1, 5, True, False),
        (0.004, 5, True, True),
    ],
)
def test_times_come_from_rounds_without_a_late_client(
    share: float, rounds: int, median: bool, percentile: bool
) -> None:
    """A late client spoils a percentile before a median."""
    whole = [replace(at(speed), e2e_s=1.0) for speed in (1.0, 2.0, 3.0, 4.0, 5.0)]
    slept = [replace(one, slept_s=share * one.wall_s) for one in whole[:rounds]]
    late = figures(POINT, [slept, whole[rounds:]])
    times = (late.ttft_s, late.tpot_s, late.itl_s, late.e2e_s)
    assert [time is not None for time in times] == [median] * 4
    assert (late.itl_p99_s is not None) is percentile
    assert (late.output_tok_s.n, late.req_s.n) == (5, 5)


@pytest.mark.parametrize(
    ("arm", "baseline", "change"),
    [
        (
            boots((200, 201, 202), (199, 200, 201)),
            boots((100, 101, 102), (99, 100, 101)),
            ThroughputChange.FASTER,
        ),
        (
            boots((50, 51, 52), (49, 50, 51)),
            boots((100, 101, 102), (99, 100, 101)),
            ThroughputChange.SLOWER,
        ),
        # Clear of 1, and within what the noisier arm does by itself.
        (
            boots((102, 103, 104), (102, 103, 104)),
            boots((90, 100, 101), (90, 100, 101)),
            ThroughputChange.NONE,
        ),
        (
            boots((105, 110, 115), (105, 110, 115)),
            boots((100, 100, 100), (100, 100, 100)),
            ThroughputChange.FASTER,
        ),
        # Far apart, and the two boots of one arm are further apart.
        (
            boots((300, 301, 302), (90, 91, 92)),
            boots((100, 101, 102), (99, 100, 101)),
            ThroughputChange.NONE,
        ),
        (boots((200, 201, 202)), boots((100, 101, 102), (99, 100, 101)), ThroughputChange.UNJUDGED),
    ],
)
def test_changes_that_are_claimed(
    arm: list[list[Round]], baseline: list[list[Round]], change: ThroughputChange
) -> None:
    found = ratio(arm, baseline, 1)
    assert found.change is change
    assert found.low <= found.ratio <= found.high
    assert (found.n, found.boots) == (3 * found.boots, min(len(arm), len(baseline)))
    assert found == ratio(arm, baseline, 1), "the seed decides"


speeds = st.lists(st.lists(st.floats(1.0, 1000.0), min_size=1, max_size=6), min_size=1, max_size=3)


@given(speeds, speeds, st.integers(0, 9), st.floats(0.1, 10.0))
@settings(max_examples=40)
def test_a_bootstrap_interval(
    arm: list[list[float]], baseline: list[list[float]], seed: int, factor: float
) -> None:
    low, high = interval(arm, baseline, seed, resamples=200)
    assert low <= high
    values, others = (
        [one for boot in arm for one in boot],
        [one for boot in baseline for one in boot],
    )
    assert min(values) / max(others) <= low + 1e-12
    assert high <= max(values) / min(others) + 1e-12
    assert (low, high) == interval(arm, baseline, seed, resamples=200)
    scaled = interval(
        [[one * factor for one in boot] for boot in arm], baseline, seed, resamples=200
    )
    assert scaled == pytest.approx((low * factor, high * factor))


def test_an_interval_of_known_values() -> None:
    """The 2nd and the 39th of 40 sorted ratios: 0.83, 0.875, 1.0 … 5.5, 6.5, 6.75."""
    found = interval([[1.0, 2.5, 4.0, 5.5], [4.5, 6.5, 9.0]], [[1.0, 2.0, 3.0]], 6, resamples=40)
    assert found == (0.875, 6.5)


def test_the_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    """With 5 % noise, 190 or more of 200 intervals cover the true ratio 1.3."""
    draw = random.Random(7)

    def noisy(true: float) -> list[list[float]]:
        return [[true * exp(draw.gauss(0, 0.05)) for _ in range(5)]]

    found = [interval(noisy(130.0), noisy(100.0), seed, resamples=300) for seed in range(200)]
    assert sum(low <= 1.3 <= high for low, high in found) >= 188
    assert median(high - low for low, high in found) < 0.22


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        ("gpu", ""),
        ("cpu", ""),
        ("lab", "LAB"),
        ("scheduler", "SCHEDULER ONLY"),
        ("rehearsal", "REHEARSAL"),
        ("unknown", "device of this server"),
    ],
)
def test_throughput_is_withheld_where_vllm_did_not_run_whole(evidence: str, reason: str) -> None:
    assert (reason in withheld(evidence)) if reason else withheld(evidence) == ""


@pytest.mark.parametrize(
    ("weights", "depth", "label"),
    [
        ("real", (32, 32), "real weights; 2 CPUs"),
        ("real", None, "real weights; 2 CPUs"),
        ("dummy", (1, 32), "random weights, 1 of 32 layers; 2 CPUs"),
        ("made", (2, 32), "random weights, 2 of 32 layers; 2 CPUs"),
        ("dummy", (32, 32), "random weights, full depth; 2 CPUs"),
        ("dummy", (1, 0), "random weights, 1 of the model's layers; 2 CPUs"),
        ("dummy", None, "random weights; 2 CPUs"),
        (None, None, "unknown weights; 2 CPUs"),
    ],
)
def test_a_label_names_weights_and_device(
    weights: str | None, depth: tuple[int, int] | None, label: str
) -> None:
    assert label_of(weights, depth, "2 CPUs") == label


@pytest.mark.parametrize(
    ("warm_ups", "speeds", "drifts"),
    [
        (0.05, (100, 100, 200, 200), False),
        (0.06, (100, 100, 200, 200), True),
        (0.06, (100, 101, 99, 100), False),
        (0.06, (100, 150, 126), True),
        (0.06, (100, 150, 124), False),
        (1.0, (100,), False),
        (1.0, (100, 130, 130, 130), False),
    ],
)
def test_a_load_drifts_if_neither_warm_ups_nor_halves_agree(
    warm_ups: float, speeds: tuple[float, ...], drifts: bool
) -> None:
    assert drifted(warm_ups, speeds) is drifts


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": 0, "output": 8}, "1 token or more"),
        ({"prompt": 8, "output": 1}, "2 or more"),
        ({"prompt": 8, "output": 8, "rounds": 2}, "3 at least"),
        ({"prompt": 8, "output": 8, "concurrency": []}, "concurrency"),
        ({"prompt": 8, "output": 8, "concurrency": [2, 2]}, "each number once"),
        ({"prompt": 8, "output": 8, "concurrency": [1, 17]}, "at most 16"),
    ],
)
def test_useless_loads_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Load(baseline="eager", **fields)


@pytest.mark.parametrize(
    ("load", "points"),
    [
        ({"prompt": 1, "output": 2}, (Point(1, 2, 1),)),
        (
            {"prompt": 128, "output": 512, "concurrency": [1, 16], "rounds": 3},
            (Point(128, 512, 1), Point(128, 512, 16)),
        ),
    ],
)
def test_a_load_is_a_point_for_each_concurrency(
    load: dict[str, Any], points: tuple[Point, ...]
) -> None:
    assert Load(baseline="eager", **load).points == points
    assert str(Point(128, 512, 8)) == "128 -> 512 tokens, 8 at once"


@pytest.mark.parametrize(
    ("arms", "longest", "baseline", "length"),
    [
        (("reported", "eager"), None, "eager", 128),
        (("reported",), 8192, "", 128),
        (("reported",), 96, "", 48),
        (("reported",), 255, "", 127),
        (("reported",), -1, "", 128),
        (("reported",), 3, "", 2),
        (("reported",), 1, "", 2),
    ],
)
def test_the_usual_load_fits_the_server(
    arms: tuple[str, ...], longest: int | None, baseline: str, length: int
) -> None:
    load = usual_load(arms, longest)
    assert (load.baseline, load.concurrency) == (baseline, (1, 4))
    assert (load.prompt, load.output) == (length, length)
