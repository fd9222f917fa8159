"""How fast an arm serves, held against a baseline arm. Pure: the times of requests in, statistics out.

    throughput=[
        throughput(prompt=128, output=512, concurrency=[1, 2, 4, 8], baseline="eager"),
        throughput(prompt=8192, output=512, concurrency=[1, 2], baseline="eager"),
    ]

The unit is a round: so many requests sent at once, until the last one has its answer. Each round gives one value of each figure; a figure's
median and quartiles are over rounds. Two arms are compared by the ratio of their medians, with a bootstrap interval that draws boots first
and rounds within them, so that two boots that differ widen it. A change is claimed only where the interval is clear of 1 *and* the ratio
lies outside twice the coefficient of variation of the noisier arm: either alone is met too often by nothing at all. From one boot of an arm
none is claimed: its rounds agree with each other better than with those of the next boot.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from math import ceil
from statistics import fmean, median, quantiles, stdev

from vllm_repro.evidence import facts_of

__all__ = [
    "Change",
    "Figures",
    "Load",
    "Point",
    "Ratio",
    "Round",
    "Spread",
    "Timing",
    "figures",
    "interval",
    "ratio",
    "round_of",
    "throughput",
    "withheld",
]

LEAST_ROUNDS = 5
WARM_UPS = 2
_RESAMPLES, _LEAST_RESAMPLES = 2_000, 200
_DRAWN = 2_000_000
"""Values that are drawn for one interval at most, down to the least number of resamples: thousands of boots are fewer resamples' work."""


@dataclass(frozen=True, order=True)
class Point:
    """One load: prompts and answers of so many tokens, and so many requests at once."""

    prompt: int
    output: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.prompt:,} -> {self.output:,} tokens, {self.concurrency} at once"


@dataclass(frozen=True)
class Load:
    """What a scenario declares: points that differ only in their concurrency. baseline: the arm that the others are held against."""

    prompt: int
    output: int
    concurrency: tuple[int, ...]
    baseline: str
    rounds: int = LEAST_ROUNDS

    @property
    def points(self) -> tuple[Point, ...]:
        return tuple(Point(self.prompt, self.output, number) for number in self.concurrency)


def throughput(
    *, prompt: int, output: int, baseline: str, concurrency: Sequence[int] = (1,), rounds: int = LEAST_ROUNDS
) -> Load:
    """A load that is measured with `--throughput`, once an arm's engine has lived through its workload."""
    if prompt < 1 or output < 2:
        raise ValueError(
            "a load has prompts of 1 token or more and answers of 2 or more: the time per token is between two"
        )
    if not concurrency or min(concurrency) < 1 or len(set(concurrency)) < len(concurrency):
        raise ValueError("concurrency=[…] holds how many requests are sent at once, each number once")
    if rounds < LEAST_ROUNDS:
        raise ValueError(f"{rounds} rounds show no spread: {LEAST_ROUNDS} at least")
    return Load(prompt, output, tuple(concurrency), baseline, rounds)


@dataclass(frozen=True)
class Timing:
    """One answered request. Seconds on any one clock; chunks: when each piece of the answer came; tokens by the server's usage."""

    sent: float
    ended: float
    chunks: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Round:
    """One value of each figure, of requests that were sent at once.

    wall_s: from the first request sent to the last one answered; the two rates are over it. ttft_s, tpot_s: median over requests of the
    time to the first piece and of the mean time per further token. itl_s, itl_p99_s: of all gaps between pieces; None where an answer
    came in one. late_s, slept_s: the most by which the client itself was late, and the sum of it (`running.lateness`): the times hold
    that much of its own, the rates hardly any.
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
        """Whether the times are the server's: a client that comes late finds many tokens at once, and takes the last one for the first."""
        return self.late_s < 0.5 * self.ttft_s and self.slept_s < 0.2 * self.wall_s


def round_of(timings: Sequence[Timing], late: float = 0.0, slept: float = 0.0) -> Round:
    """Raises ValueError for a request without an answer of two tokens or more: it has no time per token."""
    if not timings or any(not one.chunks or one.output_tokens < 2 for one in timings):
        raise ValueError("a round is made of answered requests with two tokens or more")
    wall = max(one.ended for one in timings) - min(one.sent for one in timings)
    output = sum(one.output_tokens for one in timings)
    gaps = sorted(
        later - earlier for one in timings for earlier, later in zip(one.chunks, one.chunks[1:], strict=False)
    )
    return Round(
        wall,
        len(timings),
        sum(one.prompt_tokens for one in timings),
        output,
        output / wall,
        len(timings) / wall,
        median(one.chunks[0] - one.sent for one in timings),
        median((one.chunks[-1] - one.chunks[0]) / (one.output_tokens - 1) for one in timings),
        median(gaps) if gaps else None,
        gaps[ceil(0.99 * len(gaps)) - 1] if gaps else None,
        late,
        slept,
    )


@dataclass(frozen=True)
class Spread:
    """A median, the quartiles about it, and the coefficient of variation, of n rounds."""

    median: float
    low: float
    high: float
    cv: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises `statistics.StatisticsError` for no value."""
        middle, mean = median(values), fmean(values)
        if len(values) < 2:
            return cls(middle, middle, middle, 0.0, 1)
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(middle, low, high, stdev(values) / mean if mean else 0.0, len(values))


@dataclass(frozen=True)
class Figures:
    """What an arm does at one point, over all rounds of all its boots. Times in seconds, of the timely rounds only; None where these are
    fewer than `LEAST_ROUNDS`."""

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
    """`boots`: the rounds of each boot, one round at least."""
    rounds = [one for boot in boots for one in boot]
    timely = [one for one in rounds if one.timely]

    def times(values: Iterable[float | None]) -> Spread | None:
        known = [value for value in values if value is not None]
        return Spread.of(known) if len(known) >= LEAST_ROUNDS else None

    return Figures(
        point,
        len(boots),
        Spread.of([one.output_tok_s for one in rounds]),
        Spread.of([one.req_s for one in rounds]),
        times(one.ttft_s for one in timely),
        times(one.tpot_s for one in timely),
        times(one.itl_s for one in timely),
        times(one.itl_p99_s for one in timely),
        Spread.of([one.late_s for one in rounds]),
    )


class Change(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    NONE = "no change shown"
    UNJUDGED = "one boot"


@dataclass(frozen=True)
class Ratio:
    """Output tokens a second, an arm's over the baseline's: ratio of medians, 95 % bootstrap interval, rounds and boots of the one that
    has fewer."""

    ratio: float
    low: float
    high: float
    n: int
    boots: int
    change: Change


def interval(
    arm: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]], seed: int, *, resamples: int | None = None
) -> tuple[float, float]:
    """The 95 % percentile bootstrap interval of the ratio of medians. Values above 0, by boot; the same seed gives the same interval."""
    draw = random.Random(seed)
    values = sum(map(len, (*arm, *baseline)))
    resamples = resamples or max(_LEAST_RESAMPLES, min(_RESAMPLES, _DRAWN // max(1, values)))

    def drawn(boots: Sequence[Sequence[float]]) -> float:
        chosen = draw.choices(boots, k=len(boots))
        return median([value for boot in chosen for value in draw.choices(boot, k=len(boot))])

    ratios = sorted(drawn(arm) / drawn(baseline) for _ in range(resamples))
    return ratios[int(0.025 * resamples)], ratios[ceil(0.975 * resamples) - 1]


def ratio(arm: Sequence[Sequence[Round]], baseline: Sequence[Sequence[Round]], seed: int) -> Ratio:
    """The arm's output tokens a second over the baseline's; each is the rounds of each boot."""
    ours = [[one.output_tok_s for one in boot] for boot in arm]
    theirs = [[one.output_tok_s for one in boot] for boot in baseline]
    one, other = Spread.of(list(chain.from_iterable(ours))), Spread.of(list(chain.from_iterable(theirs)))
    low, high = interval(ours, theirs, seed)
    found = one.median / other.median
    change = Change.UNJUDGED if min(len(arm), len(baseline)) < 2 else Change.NONE
    if change is Change.NONE and not low <= 1.0 <= high and abs(found - 1.0) > 2.0 * max(one.cv, other.cv):
        change = Change.FASTER if found > 1.0 else Change.SLOWER
    return Ratio(found, low, high, min(one.n, other.n), min(len(arm), len(baseline)), change)


def withheld(evidence: str, weights: str | None) -> str:
    """Why figures are no claim about vLLM, as a sentence; empty where they are one. weights: "real", "dummy", None where unknown."""
    if why := facts_of(evidence).no_throughput:
        return why
    if weights == "dummy":
        return "No throughput is claimed: the weights are random"
    if weights is None:
        return "No throughput is claimed: nobody can say which weights were served"
    return ""
