"""Throughput of an arm, compared with a baseline arm. Pure: the times of requests in, statistics out.

    throughput=[
        throughput(prompt=128, output=512, concurrency=[1, 2, 4, 8], baseline="eager"),
        throughput(prompt=8192, output=512, concurrency=[1, 2], baseline="eager"),
    ]

A round is a number of requests sent at once, until the last has its answer. Each round gives one value of each figure; medians and
quartiles are over rounds. Two arms are compared by the ratio of their medians, with a bootstrap interval that draws boots first and
rounds within them, so that boots that differ widen it.

A change is claimed only if the interval excludes 1 *and* the ratio lies outside twice the coefficient of variation of the noisier arm:
noise alone meets either one too often. One boot of an arm proves none, since its rounds agree better than those of two boots.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from math import ceil
from statistics import fmean, median, quantiles, stdev

from vllm_repro.evidence import facts_of

__all__ = [
    "Figures",
    "Load",
    "Point",
    "Ratio",
    "Round",
    "Spread",
    "ThroughputChange",
    "Timing",
    "figures",
    "interval",
    "ratio",
    "round_of",
    "withheld",
]

LEAST_ROUNDS = 5
MOST_STREAMS = 8
"""Streams up to which the client reports 99 % of the true token rate; at 16 it is 97 %, at 64 it is 62 % (two cores)."""
WARM_UPS = 2
_RESAMPLES = 2_000


@dataclass(frozen=True, order=True)
class Point:
    """One load: tokens of prompt and answer, and requests at once."""

    prompt: int
    output: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.prompt:,} -> {self.output:,} tokens, {self.concurrency} at once"


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load that `--throughput` measures after the workload of each arm whose engine lives: points that differ in concurrency.

    baseline: the arm to compare the others with. Raises `ValueError` for a load that gives no figures.
    """

    prompt: int
    output: int
    baseline: str
    concurrency: Sequence[int] = (1,)
    rounds: int = LEAST_ROUNDS

    def __post_init__(self) -> None:
        numbers = self.concurrency
        if self.prompt < 1 or self.output < 2:
            raise ValueError(
                "a load needs prompts of 1 token or more and answers of 2 or more, to have a time per token"
            )
        if not numbers or min(numbers) < 1 or len(set(numbers)) < len(numbers):
            raise ValueError("concurrency=[…] needs numbers of requests of 1 or more, each number once")
        if max(numbers) > MOST_STREAMS:
            raise ValueError(f"concurrency is at most {MOST_STREAMS}: with more streams the client limits the rate")
        if self.rounds < LEAST_ROUNDS:
            raise ValueError(f"rounds={self.rounds} must be {LEAST_ROUNDS} at least, to show a spread")

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(Point(self.prompt, self.output, number) for number in self.concurrency)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One answered request. Seconds on one clock. chunks: the arrival of each piece of the answer. Tokens: from the server's usage."""

    sent: float
    ended: float
    chunks: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """The figures of one round. Times in seconds.

    wall_s: from the first request sent to the last answered; both rates are over it. ttft_s, tpot_s: medians over requests of the time to
    the first piece and of the mean time per further token. itl_s, itl_p99_s: of all gaps between pieces; None if each answer came in one
    piece. late_s, slept_s: the most by which the client itself was late, and the sum of it (`running.lateness`).
    """

    wall_s: float
    requests: int
    prompt_tokens: int
    output_tokens: int
    output_tok_s: float
    req_s: float
    ttft_s: float
    tpot_s: float
    itl_s: float | None
    itl_p99_s: float | None
    late_s: float = 0.0
    slept_s: float = 0.0

    @property
    def timely(self) -> bool:
        """Return False if the client was too late: it then reads many tokens at once, and its times are not the server's."""
        return self.late_s < 0.5 * self.ttft_s and self.slept_s < 0.2 * self.wall_s


def round_of(timings: Sequence[Timing], late: float = 0.0, slept: float = 0.0) -> Round:
    """Return the figures of the requests of one round. Raises ValueError if one has fewer than two tokens."""
    if not timings or any(not one.chunks or one.output_tokens < 2 for one in timings):
        raise ValueError("a round is made of answered requests with two tokens or more")
    wall = max(one.ended for one in timings) - min(one.sent for one in timings)
    output = sum(one.output_tokens for one in timings)
    gaps = sorted(
        later - earlier for one in timings for earlier, later in zip(one.chunks, one.chunks[1:], strict=False)
    )
    return Round(
        wall_s=wall,
        requests=len(timings),
        prompt_tokens=sum(one.prompt_tokens for one in timings),
        output_tokens=output,
        output_tok_s=output / wall,
        req_s=len(timings) / wall,
        ttft_s=median(one.chunks[0] - one.sent for one in timings),
        tpot_s=median((one.chunks[-1] - one.chunks[0]) / (one.output_tokens - 1) for one in timings),
        itl_s=median(gaps) if gaps else None,
        itl_p99_s=gaps[ceil(0.99 * len(gaps)) - 1] if gaps else None,
        late_s=late,
        slept_s=slept,
    )


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median, quartiles and coefficient of variation of n rounds."""

    median: float
    low: float
    high: float
    cv: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        middle, mean = median(values), fmean(values)
        if len(values) < 2:
            return cls(median=middle, low=middle, high=middle, cv=0.0, n=1)
        low, _, high = quantiles(values, method="inclusive")
        return cls(median=middle, low=low, high=high, cv=stdev(values) / mean if mean else 0.0, n=len(values))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Figures of an arm at one point, over all rounds of all its boots.

    Times in seconds, of the timely rounds; None if these are fewer than `LEAST_ROUNDS`.
    """

    point: Point
    boots: int
    output_tok_s: Spread
    req_s: Spread
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    itl_p99_s: Spread | None
    late_s: Spread


def figures(point: Point, boots: Sequence[Sequence[Round]]) -> Figures:
    """Return the figures of an arm. boots: the rounds of each boot, at least one."""
    rounds = [one for boot in boots for one in boot]
    timely = [one for one in rounds if one.timely]

    def times(figure: Callable[[Round], float | None]) -> Spread | None:
        known = [value for one in timely if (value := figure(one)) is not None]
        return Spread.of(known) if len(known) >= LEAST_ROUNDS else None

    return Figures(
        point=point,
        boots=len(boots),
        output_tok_s=Spread.of([one.output_tok_s for one in rounds]),
        req_s=Spread.of([one.req_s for one in rounds]),
        ttft_s=times(lambda one: one.ttft_s),
        tpot_s=times(lambda one: one.tpot_s),
        itl_s=times(lambda one: one.itl_s),
        itl_p99_s=times(lambda one: one.itl_p99_s),
        late_s=Spread.of([one.late_s for one in rounds]),
    )


class ThroughputChange(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    NONE = "no change shown"
    UNJUDGED = "one boot"


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ratio of the medians of output tokens per second, arm over baseline, with its 95 % bootstrap interval.

    n, boots: rounds and boots of the arm that has fewer.
    """

    ratio: float
    low: float
    high: float
    n: int
    boots: int
    change: ThroughputChange


def interval(
    arm: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]], seed: int, *, resamples: int = _RESAMPLES
) -> tuple[float, float]:
    """Return the 95 % percentile bootstrap interval of the ratio of medians. Values: above 0, by boot."""
    draw = random.Random(seed)

    def drawn(boots: Sequence[Sequence[float]]) -> float:
        chosen = draw.choices(boots, k=len(boots))
        return median([value for boot in chosen for value in draw.choices(boot, k=len(boot))])

    ratios = sorted(drawn(arm) / drawn(baseline) for _ in range(resamples))
    return ratios[int(0.025 * resamples)], ratios[ceil(0.975 * resamples) - 1]


def ratio(arm: Sequence[Sequence[Round]], baseline: Sequence[Sequence[Round]], seed: int) -> Ratio:
    """Compare the output tokens per second of an arm with the baseline's. Both: the rounds of each boot."""
    ours = [[one.output_tok_s for one in boot] for boot in arm]
    theirs = [[one.output_tok_s for one in boot] for boot in baseline]
    one, other = (Spread.of(list(chain.from_iterable(side))) for side in (ours, theirs))
    low, high = interval(ours, theirs, seed)
    found = one.median / other.median
    boots = min(len(arm), len(baseline))
    if boots < 2:
        change = ThroughputChange.UNJUDGED
    elif low <= 1.0 <= high or abs(found - 1.0) <= 2.0 * max(one.cv, other.cv):
        change = ThroughputChange.NONE
    else:
        change = ThroughputChange.FASTER if found > 1.0 else ThroughputChange.SLOWER
    return Ratio(ratio=found, low=low, high=high, n=min(one.n, other.n), boots=boots, change=change)


def withheld(evidence: str, weights: str | None) -> str:
    """Return why no throughput is claimed, as a sentence; empty if it is. weights: "real", "dummy", None if unknown."""
    if why := facts_of(evidence).no_throughput:
        return why
    if weights == "dummy":
        return "No throughput is claimed: the weights are random"
    if weights is None:
        return "No throughput is claimed: it is unknown which weights were served"
    return ""
