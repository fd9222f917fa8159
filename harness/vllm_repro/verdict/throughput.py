"""Throughput of an arm, compared with a baseline arm.

Pure: the times of requests in, statistics out.

    throughput=[
        throughput(prompt=128, output=512, concurrency=[1, 2, 4, 8], baseline="eager"),
        throughput(prompt=8192, output=512, concurrency=[1, 2], baseline="eager"),
    ]

A round sends a number of requests at once and ends with the last answer. Rounds count once the load
is steady: the last two of two to five warm-up rounds agree within 5 %, or later the two halves of
the rounds within 20 %. Each round gives one value of each figure; medians and quartiles are over
rounds. Two arms are compared by the ratio of their medians, with a bootstrap interval that draws
trials first and rounds within them, so that trials that differ widen it.

A change is claimed only if the interval excludes 1 *and* the ratio lies outside twice the
coefficient of variation of the noisier arm: noise alone meets one condition too often. One trial of
an arm proves no change, because its rounds agree better than those of two trials.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, pairwise
from math import ceil
from statistics import fmean, median, quantiles, stdev

from vllm_repro_diagnosis.evidence import facts_of

ROUNDS, LEAST_ROUNDS = 5, 3
"""Rounds of a load if it names no number, and the fewest that give a figure."""
MOST_STREAMS = 16
"""Most requests at once."""
MOST_CPU = 0.9
"""Share of a core above which the client, not the server, may limit the rate."""
MOST_LATE, MOST_LATE_P99 = 0.1, 0.005
"""Shares of a round in which the client may be late: for medians, for 99th percentiles."""
MOST_OFF = 0.01
"""Largest error of the speed that the client may cause in a counted round, as a share."""
TICK = 0.002
"""Seconds between two checks of the client's event loop; a shorter delay is not noticed."""
WARM_UPS, MOST_WARM_UPS, STEADY = 2, 5, 0.05
"""Warm-up rounds: the least, the most, and the difference of the last two in a steady load."""
DRIFT = 0.2
"""Difference of the halves of the rounds above which a load never became steady."""
_RESAMPLES = 2_000


@dataclass(frozen=True, order=True)
class Point:
    """One load: tokens of prompt and answer, and the requests of a round."""

    prompt: int
    output: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.prompt:,} -> {self.output:,} tokens, {self.concurrency} at once"


@dataclass(frozen=True, kw_only=True)
class Load:
    """A load to measure in each arm whose engine lives: points that differ in concurrency.

    Raises `ValueError` for a load that gives no figures, or for more than `MOST_STREAMS` at once.
    """

    # tokens of each prompt and of each answer
    prompt: int
    output: int
    # the arm to compare the others with; empty for the first one that lives
    baseline: str
    # requests of a round, for each point
    concurrency: Sequence[int] = (1,)
    # rounds that count, after those to warm up
    rounds: int = ROUNDS

    def __post_init__(self) -> None:
        numbers = self.concurrency
        if self.prompt < 1 or self.output < 2:
            raise ValueError(
                "a load needs prompts of 1 token or more and answers of 2 or more, to have a time"
                " per token"
            )
        if not numbers or min(numbers) < 1 or len(set(numbers)) < len(numbers):
            raise ValueError(
                "concurrency=[…] needs numbers of requests of 1 or more, each number once"
            )
        if max(numbers) > MOST_STREAMS:
            raise ValueError(f"concurrency is at most {MOST_STREAMS}")
        if self.rounds < LEAST_ROUNDS:
            raise ValueError(
                f"rounds={self.rounds} must be {LEAST_ROUNDS} at least, to show a spread"
            )

    @property
    def points(self) -> tuple[Point, ...]:
        """Its points to measure, one for each number of concurrent requests."""
        return tuple(Point(self.prompt, self.output, number) for number in self.concurrency)


def usual_load(arms: Collection[str], longest: int | None) -> Load:
    """Return the load of a scenario that declares none, with `eager` as the baseline.

    Prompt and answer have 128 tokens each, or half of `longest` if that is less; 1 and 4 requests
    are sent at once. Without an arm `eager` the baseline is the first arm that lives. longest:
    tokens of prompt and answer together that the server accepts, None if no flag limits them.
    """
    # -1 lets vLLM choose
    length = max(2, min(128, longest // 2)) if longest and longest > 0 else 128
    baseline = "eager" if "eager" in arms else ""
    return Load(prompt=length, output=length, concurrency=(1, 4), baseline=baseline)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Times and token counts of one answered request, in seconds on one clock."""

    # before its bytes were written
    sent: float
    ended: float
    # arrival of each piece of the answer
    chunks: tuple[float, ...]
    # from the server's usage
    prompt_tokens: int
    output_tokens: int
    # after its bytes were written, if the kernel stamped the arrivals; else None
    written: float | None = None


@dataclass(frozen=True, kw_only=True)
class ClientCost:
    """CPU use and delay of the load client in a round, to detect that it limited the server.

    They are measured without the times of answers.
    """

    # CPU time of the client, as a share of a core
    cpu: float = 0.0
    # longest delay of its event loop
    late_s: float = 0.0
    # sum of the delays longer than `TICK`
    slept_s: float = 0.0
    # time in which it was ready to run and the kernel ran others
    queued_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Round(ClientCost):
    """Figures of one round of a load: rates, latencies in seconds, and the client's own delay."""

    # from the first request sent to the last answered; all rates are over it
    wall_s: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    output_tok_s: float
    req_s: float
    # medians over requests: to the first piece, per further token, and to the end
    ttft_s: float
    tpot_s: float
    # of all gaps between pieces; None if each answer came in one piece
    itl_s: float | None
    itl_p99_s: float | None
    e2e_s: float | None = None
    # the most by which `wall_s` may be too long because the client was late when it began or ended
    edge_s: float = 0.0

    def timely(self, most: float) -> bool:
        """Return True if the client's delays add up to at most `most`, a share of the round."""
        return self.slept_s <= most * self.wall_s

    @property
    def limited(self) -> str:
        """Return why the client may have been the limit of the round; empty if it was not."""
        queued = self.queued_s / self.wall_s
        if self.cpu + queued <= MOST_CPU:
            return ""
        waited = (
            f" and waited for one in {100 * queued:.0f} % of the time"
            if queued > 1 - MOST_CPU
            else ""
        )
        return (
            f"the client used {100 * self.cpu:.0f} % of a core{waited}, so it may have been the"
            " limit"
        )

    @property
    def late(self) -> str:
        """Return why the client was too late at a round's ends to time it; empty if it was not."""
        if self.edge_s <= MOST_OFF * self.wall_s:
            return ""
        return (
            f"the client was late by up to {1000 * self.edge_s:.1f} ms at the ends of a round of"
            f" {self.wall_s:.3g} s"
        )


def round_of(timings: Sequence[Timing], client: ClientCost = ClientCost()) -> Round:
    """Return the figures of one round.

    Raises `ValueError` for no answers, an answer of fewer than two tokens, or one without pieces.
    """
    if not timings or any(not timing.chunks or timing.output_tokens < 2 for timing in timings):
        raise ValueError("a round is made of answered requests with two tokens or more")
    began, ended = min(timing.sent for timing in timings), max(timing.ended for timing in timings)
    wall = ended - began
    output = sum(timing.output_tokens for timing in timings)
    gaps = sorted(
        later - earlier for timing in timings for earlier, later in pairwise(timing.chunks)
    )
    return Round(
        **vars(client),
        wall_s=wall,
        requests=len(timings),
        prompt_tokens=sum(timing.prompt_tokens for timing in timings),
        output_tokens=output,
        output_tok_s=output / wall,
        req_s=len(timings) / wall,
        ttft_s=median(timing.chunks[0] - timing.sent for timing in timings),
        tpot_s=median(
            (timing.chunks[-1] - timing.chunks[0]) / (timing.output_tokens - 1)
            for timing in timings
        ),
        itl_s=median(gaps) if gaps else None,
        itl_p99_s=gaps[ceil(0.99 * len(gaps)) - 1] if gaps else None,
        e2e_s=median(timing.ended - timing.sent for timing in timings),
        edge_s=_edge_s(timings, client, began),
    )


def _edge_s(timings: Sequence[Timing], client: ClientCost, began: float) -> float:
    """Return by how many seconds the client's delay may have made a round too long.

    began: when the first request was sent.
    """
    written = [timing.written for timing in timings if timing.written is not None]
    # the kernel stamps arrivals, so only the first write can be late
    if len(written) == len(timings):
        return min(written) - began
    # the worst stall may lie at both ends, beside a wait for the core that no tick saw
    return 2 * client.late_s + min(client.queued_s, 2 * TICK)


def unsteady(warm_ups: Sequence[float]) -> float:
    """Return by what share the last two warm-up speeds differ: 0 if equal, 1 for fewer than two."""
    return 1 - min(warm_ups[-2:]) / max(warm_ups[-2:]) if len(warm_ups) > 1 else 1.0


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, quartiles and coefficient of variation of n rounds."""

    median: float
    # quartiles
    low: float
    high: float
    # standard deviation divided by the mean
    cv: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values; a single value has no width."""
        middle, mean = median(values), fmean(values)
        if len(values) < 2:
            return cls(median=middle, low=middle, high=middle, cv=0.0, n=1)
        low, _, high = quantiles(values, method="inclusive")
        return cls(
            median=middle,
            low=low,
            high=high,
            cv=stdev(values) / mean if mean else 0.0,
            n=len(values),
        )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Throughput and latency of an arm under one load, over all rounds of all its trials.

    A load is a prompt length, an answer length and a number of streams. Times are in seconds, of
    the rounds in which the client did not delay a request; None if these are fewer than
    `LEAST_ROUNDS`.
    """

    point: Point
    boots: int
    output_tok_s: Spread
    req_s: Spread
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    itl_p99_s: Spread | None
    e2e_s: Spread | None
    # of the client
    cpu: Spread
    late_s: Spread


def figures(point: Point, trials: Sequence[Sequence[Round]]) -> Figures:
    """Return an arm's throughput and latency at one point.

    trials: the rounds of each trial, at least one. Latencies leave out rounds in which the client
    was late; see `Figures`.
    """
    rounds = list(chain.from_iterable(trials))

    def timely(
        figure: Callable[[Round], float | None], most_late: float = MOST_LATE
    ) -> Spread | None:
        values = [figure(measured) for measured in rounds if measured.timely(most_late)]
        known = [value for value in values if value is not None]
        return Spread.of(known) if len(known) >= LEAST_ROUNDS else None

    return Figures(
        point=point,
        boots=len(trials),
        output_tok_s=_speed(trials),
        req_s=Spread.of([measured.req_s for measured in rounds]),
        ttft_s=timely(lambda measured: measured.ttft_s),
        tpot_s=timely(lambda measured: measured.tpot_s),
        itl_s=timely(lambda measured: measured.itl_s),
        itl_p99_s=timely(lambda measured: measured.itl_p99_s, MOST_LATE_P99),
        e2e_s=timely(lambda measured: measured.e2e_s),
        cpu=Spread.of([measured.cpu for measured in rounds]),
        late_s=Spread.of([measured.late_s for measured in rounds]),
    )


def _speed(trials: Sequence[Sequence[Round]]) -> Spread:
    """Return the spread of output tokens per second over all rounds of the trials."""
    return Spread.of([measured.output_tok_s for trial in trials for measured in trial])


class ThroughputChange(StrEnum):
    """Speed of an arm compared with the baseline arm."""

    FASTER = "faster"
    SLOWER = "slower"
    NONE = "no change shown"  # the difference may be noise
    UNJUDGED = "one boot"  # an arm has fewer than two trials


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ratio of the medians of output tokens per second, arm over baseline.

    low, high: its 95 % interval. n, boots: rounds and trials of the arm that has fewer.
    """

    ratio: float
    # 95 % bootstrap interval
    low: float
    high: float
    # rounds and trials of the arm that has fewer
    n: int
    boots: int
    change: ThroughputChange


def interval(
    arm: Sequence[Sequence[float]],
    baseline: Sequence[Sequence[float]],
    seed: int,
    *,
    resamples: int = _RESAMPLES,
) -> tuple[float, float]:
    """Return the 95 % bootstrap interval (low, high) of the ratio of medians, arm over baseline.

    arm, baseline: the values of each trial, all above 0. seed: the same one gives the same result.
    """
    draw = random.Random(seed)

    def drawn(trials: Sequence[Sequence[float]]) -> float:
        chosen = draw.choices(trials, k=len(trials))
        return median([value for trial in chosen for value in draw.choices(trial, k=len(trial))])

    ratios = sorted(drawn(arm) / drawn(baseline) for _ in range(resamples))
    return ratios[int(0.025 * resamples)], ratios[ceil(0.975 * resamples) - 1]


def ratio(arm: Sequence[Sequence[Round]], baseline: Sequence[Sequence[Round]], seed: int) -> Ratio:
    """Return an arm's output tokens per second over the baseline's, and whether that is a change.

    arm, baseline: the rounds of each trial. seed: of the bootstrap; see `interval`.
    """
    ours, theirs = _speed(arm), _speed(baseline)
    low, high = interval(
        [[measured.output_tok_s for measured in trial] for trial in arm],
        [[measured.output_tok_s for measured in trial] for trial in baseline],
        seed,
    )
    middle = ours.median / theirs.median
    trials = min(len(arm), len(baseline))
    if trials < 2:
        change = ThroughputChange.UNJUDGED
    elif low <= 1.0 <= high or abs(middle - 1.0) <= 2.0 * max(ours.cv, theirs.cv):
        change = ThroughputChange.NONE
    else:
        change = ThroughputChange.FASTER if middle > 1.0 else ThroughputChange.SLOWER
    return Ratio(
        ratio=middle, low=low, high=high, n=min(ours.n, theirs.n), boots=trials, change=change
    )


def withheld(evidence: str) -> str:
    """Return why runs of this kind of evidence show no throughput; empty if they do.

    evidence: a value of `Evidence`, as the journal has it. Figures of random weights count, because
    the speed of an engine depends on shapes, flags and kernels; `label_of` names the weights.
    """
    return facts_of(evidence).no_throughput


def label_of(weights: str | None, depth: tuple[int, int] | None, device: str) -> str:
    """Return the label of a measurement: `random weights, 1 of 32 layers; 1 x NVIDIA H200`.

    weights: "real", or the name of a kind of random ones; None if unknown. depth: (layers served,
    layers of the reported model or 0 if unknown), or None if another model is served. The label
    names layers for random weights only.
    """
    kind = "unknown" if weights is None else "real" if weights == "real" else "random"
    layers = ""
    if depth is not None and kind == "random":
        served, reported = depth
        full = "full depth" if served == reported else f"{served} of {reported} layers"
        layers = f", {full}" if reported else f", {served} of the model's layers"
    return f"{kind} weights{layers}; {device}"


def drifted(warm_ups: float, speeds: Sequence[float]) -> bool:
    """Return True if a load never became steady, so that its figures depend on when it ended.

    False if the last two warm-up rounds agree. warm_ups: `unsteady` of the warm-up rounds. speeds:
    of the rounds after them, in order: noise of a busy machine is in their spread, so only halves
    that differ by more than `DRIFT` count.
    """
    half = len(speeds) // 2
    if warm_ups <= STEADY or not half:
        return False
    return unsteady((median(speeds[:half]), median(speeds[-half:]))) > DRIFT
