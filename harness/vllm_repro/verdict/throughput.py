"""Throughput of an arm, compared with a baseline arm. Pure: the times of requests in, statistics out.

    throughput=[
        throughput(prompt=128, output=512, concurrency=[1, 2, 4, 8], baseline="eager"),
        throughput(prompt=8192, output=512, concurrency=[1, 2], baseline="eager"),
    ]

Rounds count once the load is steady: the last two of two to five warm-up rounds agree within 5 %, or the report says by how much not.
A round is a number of requests sent at once, until the last has its answer. With rate=[2, 4] it is ten seconds of requests that are due
at that rate, whatever the server does, and times count from when a request was due. Each round gives one value of each figure; medians
and quartiles are over rounds. Two arms are compared by the ratio of their medians, with a bootstrap interval that draws boots first and
rounds within them, so that boots that differ widen it. A rate fixes the tokens per second: arms are then compared by the time to the end.

A change is claimed only if the interval excludes 1 *and* the ratio lies outside twice the coefficient of variation of the noisier arm:
noise alone meets either one too often. One boot of an arm proves none, since its rounds agree better than those of two boots.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, chain
from math import ceil
from statistics import fmean, median, quantiles, stdev

from vllm_repro_diagnosis.evidence import facts_of

__all__ = [
    "Arrivals",
    "ClientCost",
    "Figures",
    "Goal",
    "Load",
    "Point",
    "Ratio",
    "Round",
    "Spread",
    "ThroughputChange",
    "Timing",
    "disagreements",
    "figures",
    "interval",
    "ratio",
    "round_of",
    "unsteady",
    "withheld",
]

LEAST_ROUNDS = 5
MOST_STREAMS = 256
MOST_CPU = 0.9
"""Share of a core above which the client, not the server, may limit the rate."""
MOST_LATE, MOST_LATE_P99 = 0.1, 0.005
"""Shares of a round in which the client may be late: for its medians, and for its 99th percentiles."""
MOST_OFF = 0.01
"""Share by which the client may falsify the speed of a round that counts."""
TICK = 0.002
"""Seconds between two looks of the client at its own event loop; it may be late for as long unseen."""
_EDGE = 0.02
"""Seconds after a stall in which a write or a read may still be late because of it: others of the same turn of the loop come first."""
_APART = 0.01
"""Seconds by which a median of the client may lie outside the server's bucket."""
WARM_UPS, MOST_WARM_UPS, STEADY = 2, 5, 0.05
"""Rounds that do not count: the least, the most, and the difference of the last two at which the load is steady."""
ROUND_S, LEAST_ARRIVALS = 10.0, 10
"""A round of a rate: seconds, and the least number of requests."""
_RESAMPLES = 2_000


class Arrivals(StrEnum):
    """When the requests of a rate are due: at random intervals, or at equal ones."""

    POISSON = "poisson"
    FIXED = "fixed"


@dataclass(frozen=True, order=True)
class Point:
    """One load: tokens of prompt and answer, requests of a round, and the rate at which they are due; 0: all of them at once."""

    prompt: int
    output: int
    concurrency: int
    rate: float = 0.0
    arrivals: Arrivals = Arrivals.POISSON

    def __str__(self) -> str:
        even = ", evenly" if self.arrivals is Arrivals.FIXED else ""
        how = f"{self.rate:g} a second{even}" if self.rate else f"{self.concurrency} at once"
        return f"{self.prompt:,} -> {self.output:,} tokens, {how}"

    def due(self, seed: str) -> list[float]:
        """Return when each request of a round is due, in seconds after the first."""
        if not self.rate:
            return [0.0] * self.concurrency
        if self.arrivals is Arrivals.FIXED:
            return [number / self.rate for number in range(self.concurrency)]
        draw = random.Random(seed)
        return [0.0, *accumulate(draw.expovariate(self.rate) for _ in range(self.concurrency - 1))]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """The times in seconds that a request must meet to count for the goodput; None: any."""

    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load that `--throughput` measures after the workload of each arm whose engine lives: points that differ in concurrency or rate.

    baseline: the arm to compare the others with. rate: requests per second, in place of concurrency. ttft, tpot: the most seconds to the
    first token and per further token of a request that counts for the goodput. Raises `ValueError` for a load that gives no figures.
    """

    prompt: int
    output: int
    baseline: str
    concurrency: Sequence[int] = (1,)
    rate: Sequence[float] = ()
    arrivals: str = "poisson"
    ttft: float | None = None
    tpot: float | None = None
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
            raise ValueError(f"concurrency is at most {MOST_STREAMS}: the client was not measured with more streams")
        if any(not 0 < rate <= MOST_STREAMS for rate in self.rate) or (self.rate and tuple(numbers) != (1,)):
            raise ValueError(
                f"rate=[…] needs requests per second, up to {MOST_STREAMS}, and no concurrency=[…] beside it"
            )
        if self.arrivals not in set(Arrivals):
            raise ValueError(f"arrivals={self.arrivals!r} must be one of {', '.join(Arrivals)}")
        if any(goal is not None and goal <= 0 for goal in (self.ttft, self.tpot)):
            raise ValueError("ttft and tpot are seconds above 0")
        if self.rounds < LEAST_ROUNDS:
            raise ValueError(f"rounds={self.rounds} must be {LEAST_ROUNDS} at least, to show a spread")

    @property
    def points(self) -> tuple[Point, ...]:
        if not self.rate:
            return tuple(Point(self.prompt, self.output, number) for number in self.concurrency)
        return tuple(
            Point(self.prompt, self.output, max(LEAST_ARRIVALS, ceil(rate * ROUND_S)), rate, Arrivals(self.arrivals))
            for rate in self.rate
        )

    @property
    def goal(self) -> Goal | None:
        return Goal(ttft=self.ttft, tpot=self.tpot) if self.ttft or self.tpot else None


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One answered request. Seconds on one clock.

    sent: when its bytes were written; with a rate, when it was due, so that nothing hides the wait of a request that could not be sent.
    chunks: the arrival of each piece of the answer. Tokens: from the server's usage. written: by when its bytes were written, if the
    kernel stamped the arrivals; else None.
    """

    sent: float
    ended: float
    chunks: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    written: float | None = None


@dataclass(frozen=True, kw_only=True)
class Round:
    """The figures of one round. Times in seconds.

    wall_s: from the first request sent to the last answered; all rates are over it. ttft_s, tpot_s, e2e_s: medians over requests of the
    time to the first piece, of the mean time per further token, and of the time to the end. itl_s, itl_p99_s: of all gaps between pieces;
    None if each answer came in one piece. goodput_req_s: requests per second that met the goal. The others: see `ClientCost`.
    edge_s: the most by which `wall_s` may be too long because the client was late when it began or ended.
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
    e2e_s: float | None = None
    goodput_req_s: float | None = None
    cpu: float = 0.0
    late_s: float = 0.0
    slept_s: float = 0.0
    queued_s: float = 0.0
    unsent_s: float = 0.0
    edge_s: float = 0.0

    def timely(self, most: float) -> bool:
        """Return False if the client was late for more than this share of the round: its times are then not the server's."""
        return self.slept_s <= most * self.wall_s

    @property
    def limited(self) -> str:
        """Return why the client may have been the limit of the round; empty if it was not."""
        queued = self.queued_s / self.wall_s
        if self.cpu + queued <= MOST_CPU:
            return ""
        waited = f" and waited for one in {100 * queued:.0f} % of the time" if queued > 1 - MOST_CPU else ""
        return f"the client used {100 * self.cpu:.0f} % of a core{waited}, so it may have been the limit"

    def late(self, point: Point) -> str:
        """Return why the client falsified the speed of the round by more than `MOST_OFF`; empty if it did not."""
        if self.edge_s > MOST_OFF * self.wall_s:
            return f"the client was late by up to {1000 * self.edge_s:.1f} ms at the ends of a round of {self.wall_s:.3g} s"
        if point.rate and self.e2e_s and abs(self.unsent_s) > MOST_OFF * self.e2e_s:
            return f"the client sent requests {1000 * self.unsent_s:.1f} ms late that took {1000 * self.e2e_s:,.0f} ms"
        return ""

    def speed(self, point: Point) -> float:
        """Return what rounds are compared by: output tokens per second; at a rate, which fixes them, 1 over the time to the end."""
        return 1 / self.e2e_s if point.rate and self.e2e_s else self.output_tok_s


@dataclass(frozen=True, kw_only=True)
class ClientCost:
    """Load and lateness of the client in a round. The times of answers are not used.

    cpu: its share of a core. late_s, slept_s: the most by which its event loop was late, and the sum of it. queued_s: the time in which
    it was ready to run and the kernel ran others. unsent_s: median over requests from when they were due to their write.
    stalls: when the loop should have run and when it did, on the clock of the answers.
    """

    cpu: float = 0.0
    late_s: float = 0.0
    slept_s: float = 0.0
    queued_s: float = 0.0
    unsent_s: float = 0.0
    stalls: tuple[tuple[float, float], ...] = ()

    def edge_s(self, first: float, last: float) -> float:
        """Return by how much the time from a first write to a last read may be too long: stalls at both ends, and what no tick saw."""
        ends = (first, last)
        stalled = (max((woke - due for due, woke in self.stalls if _near(due, end, woke)), default=0.0) for end in ends)
        return sum(stalled) + min(self.queued_s, 2 * TICK)


def _near(due: float, end: float, woke: float) -> bool:
    return due - TICK <= end <= woke + _EDGE


def round_of(timings: Sequence[Timing], client: ClientCost = ClientCost(), goal: Goal | None = None) -> Round:
    """Return the figures of the requests of one round. Raises ValueError if one has fewer than two tokens."""
    if not timings or any(not one.chunks or one.output_tokens < 2 for one in timings):
        raise ValueError("a round is made of answered requests with two tokens or more")
    began, ended = min(one.sent for one in timings), max(one.ended for one in timings)
    edge, written = client.edge_s(began, ended), [one.written for one in timings if one.written is not None]
    if len(written) == len(timings):  # the kernel stamps arrivals, so only the first write can be late
        edge = min(written) - began
    wall = ended - began
    output = sum(one.output_tokens for one in timings)
    gaps = sorted(
        later - earlier for one in timings for earlier, later in zip(one.chunks, one.chunks[1:], strict=False)
    )
    ttft = [one.chunks[0] - one.sent for one in timings]
    tpot = [(one.chunks[-1] - one.chunks[0]) / (one.output_tokens - 1) for one in timings]
    good = [
        (goal.ttft is None or first <= goal.ttft) and (goal.tpot is None or further <= goal.tpot)
        for first, further in zip(ttft, tpot, strict=True)
        if goal
    ]
    return Round(
        wall_s=wall,
        requests=len(timings),
        prompt_tokens=sum(one.prompt_tokens for one in timings),
        output_tokens=output,
        output_tok_s=output / wall,
        req_s=len(timings) / wall,
        ttft_s=median(ttft),
        tpot_s=median(tpot),
        itl_s=median(gaps) if gaps else None,
        itl_p99_s=gaps[ceil(0.99 * len(gaps)) - 1] if gaps else None,
        e2e_s=median(one.ended - one.sent for one in timings),
        goodput_req_s=sum(good) / wall if goal else None,
        cpu=client.cpu,
        late_s=client.late_s,
        slept_s=client.slept_s,
        queued_s=client.queued_s,
        unsent_s=client.unsent_s,
        edge_s=edge,
    )


def unsteady(warm_ups: Sequence[float]) -> float:
    """Return by how much the speed of the last two warm-up rounds differs, as a share of the faster one; 1 for fewer than two."""
    return 1 - min(warm_ups[-2:]) / max(warm_ups[-2:]) if len(warm_ups) > 1 else 1.0


def disagreements(found: Round, server: Mapping[str, Sequence[tuple[float, float, int]]]) -> list[str]:
    """Return the medians of the client that lie outside the buckets of the server's medians.

    server: bounds and observations of its buckets, by field of `Round`. Not compared if both saw different numbers: others use the
    server too, or several tokens come in a step. A client is right to see each time some milliseconds longer.
    """
    requests, steps = found.requests, found.output_tokens - found.requests
    apart = []
    for name, field, seen in (("TTFT", "ttft_s", requests), ("ITL", "itl_s", steps), ("end to end", "e2e_s", requests)):
        ours: float | None = getattr(found, field)
        buckets = server.get(field, ())
        if ours is None or sum(number for *_, number in buckets) != seen:
            continue
        counts = list(accumulate(number for *_, number in buckets))
        low = next(low for (low, _, _), count in zip(buckets, counts, strict=True) if 2 * count >= seen)
        high = next(high for (_, high, _), count in zip(buckets, counts, strict=True) if 2 * count > seen)
        if not 0.9 * low - _APART <= ours <= 1.1 * high + _APART:
            apart.append(
                f"median {name} {1000 * ours:,.1f} ms, by the server {1000 * low:,.0f} to {1000 * high:,.0f} ms"
            )
    return apart


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

    Times in seconds, of the rounds in which the client was timely; None if these are fewer than `LEAST_ROUNDS`.
    """

    point: Point
    boots: int
    output_tok_s: Spread
    req_s: Spread
    goodput_req_s: Spread | None
    ttft_s: Spread | None
    tpot_s: Spread | None
    itl_s: Spread | None
    itl_p99_s: Spread | None
    e2e_s: Spread | None
    cpu: Spread
    late_s: Spread


def figures(point: Point, boots: Sequence[Sequence[Round]]) -> Figures:
    """Return the figures of an arm. boots: the rounds of each boot, at least one."""
    rounds = [one for boot in boots for one in boot]

    def known(figure: Callable[[Round], float | None], most_late: float = MOST_LATE) -> Spread | None:
        values = [value for one in rounds if one.timely(most_late) and (value := figure(one)) is not None]
        return Spread.of(values) if len(values) >= LEAST_ROUNDS else None

    return Figures(
        point=point,
        boots=len(boots),
        output_tok_s=Spread.of([one.output_tok_s for one in rounds]),
        req_s=Spread.of([one.req_s for one in rounds]),
        goodput_req_s=known(lambda one: one.goodput_req_s),
        ttft_s=known(lambda one: one.ttft_s),
        tpot_s=known(lambda one: one.tpot_s),
        itl_s=known(lambda one: one.itl_s),
        itl_p99_s=known(lambda one: one.itl_p99_s, MOST_LATE_P99),
        e2e_s=known(lambda one: one.e2e_s),
        cpu=Spread.of([one.cpu for one in rounds]),
        late_s=Spread.of([one.late_s for one in rounds]),
    )


class ThroughputChange(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    NONE = "no change shown"
    UNJUDGED = "one boot"


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Ratio of the medians of `Round.speed`, arm over baseline, with its 95 % bootstrap interval.

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


def ratio(point: Point, arm: Sequence[Sequence[Round]], baseline: Sequence[Sequence[Round]], seed: int) -> Ratio | None:
    """Compare the speed of an arm with the baseline's; None if times are compared and a client was late. Both: the rounds of each boot."""
    if point.rate and not all(one.timely(MOST_LATE) for boot in (*arm, *baseline) for one in boot):
        return None
    ours = [[one.speed(point) for one in boot] for boot in arm]
    theirs = [[one.speed(point) for one in boot] for boot in baseline]
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
