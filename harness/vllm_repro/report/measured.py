"""From a journal to what was measured after the workloads: throughput and soaks. Pure.

Figures are those of trials whose engine lived to the end, at points that were measured whole, and whose tokens by `usage` are those that
the server's own counters show. All others stay in the journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.report.answered import Trial, trial_of
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.output import ServedWeights
from vllm_repro.verdict.soak import Soak
from vllm_repro.verdict.throughput import Figures, Point, Ratio, Round, Spread, figures, ratio, withheld

__all__ = ["Measured", "Row", "Soaked", "measured"]


@dataclass(frozen=True)
class Row:
    """An arm at a point. ratio: to the baseline arm; None for that arm itself, and where it was not measured there."""

    arm: str
    figures: Figures
    ratio: Ratio | None


@dataclass(frozen=True)
class Soaked:
    arm: str
    trial: int
    soak: Soak


@dataclass(frozen=True)
class Measured:
    """All of a run. withheld: why no figure is a claim, as a sentence; empty where they are. drift: by trial, output tokens a second when
    its first point was measured again at the end, over those of the first time. stopped: sentences about what gave no figure."""

    baseline: str
    rows: tuple[Row, ...]
    trials: Mapping[Trial, tuple[Figures, ...]]
    drift: Mapping[Trial, float]
    soaks: tuple[Soaked, ...]
    stopped: tuple[str, ...]
    withheld: str

    def soak_of(self, arm: str, trial: int) -> Soak | None:
        return self._soaks.get((arm, trial))

    @cached_property
    def _soaks(self) -> dict[Trial, Soak]:
        return {(one.arm, one.trial): one.soak for one in reversed(self.soaks)}

    def as_json(self) -> dict[str, Any] | None:
        """`throughput` of `report.json`: nothing where nothing is claimed."""
        if self.withheld or not self.rows:
            return None
        return {
            "baseline_arm": self.baseline,
            "ratios": [
                {"arm": row.arm, **_point_json(row.figures.point), **_ratio_json(row.ratio)}
                for row in self.rows
                if row.ratio is not None
            ],
        }

    def trial_json(self, arm: str, trial: int) -> dict[str, Any] | None:
        """`throughput` of one trial: its first point under the names of the contract, and all of them."""
        found = self.trials.get((arm, trial))
        if self.withheld or not found:
            return None
        points = [_figures_json(one) for one in found]
        return {**points[0], "points": points}


def _point_json(point: Point) -> dict[str, int]:
    return {"prompt": point.prompt, "output": point.output, "concurrency": point.concurrency}


def _ratio_json(found: Ratio) -> dict[str, Any]:
    return {
        "ratio": found.ratio,
        "low": found.low,
        "high": found.high,
        "n": found.n,
        "boots": found.boots,
        "change": found.change.value,
    }


def _figures_json(one: Figures) -> dict[str, Any]:
    """Medians under plain names, and the quartiles of each beside them; null where there is none."""
    names = ("output_tok_s", "req_s", "ttft_s", "tpot_s", "itl_s", "itl_p99_s", "late_s")
    spreads: dict[str, Spread | None] = {name: getattr(one, name) for name in names}
    return {
        **_point_json(one.point),
        "rounds": one.output_tok_s.n,
        **{name: spread and spread.median for name, spread in spreads.items()},
        "quartiles": {name: spread and [spread.low, spread.high] for name, spread in spreads.items()},
    }


def measured(recording: Recording) -> Measured | None:
    """None where the run asked for neither."""
    started = recording.first("run-started")
    wishes = started.get("wishes") if started is not None else None
    if started is None or not wishes or not (wishes["throughput"] or wishes["soak"]):
        return None
    loads = started.get("loads") or ()
    baseline = str(loads[0]["baseline"]) if loads else ""
    ended = {trial_of(entry): entry for entry in recording.of("trial-ended")}
    alive = {trial for trial, entry in ended.items() if Outcome(entry["outcome"]).facts.alive}
    rounds = _rounds(recording, alive)
    by_trial = _by_trial(rounds)
    drift = {
        trial: median(_speeds(again)) / median(_speeds(first))
        for trial, those in by_trial.items()
        if (again := _first(those, again=True)) and (first := _first(those, again=False))
    }
    rows = tuple(_rows(rounds, baseline, [arm["name"] for arm in started["arms"]], started["seed"]))
    weights = {entry.get("weights") for entry in ended.values() if trial_of(entry) in alive}
    served = ServedWeights.DUMMY if ServedWeights.DUMMY in weights else None if None in weights else ServedWeights.REAL
    return Measured(
        baseline,
        rows,
        {trial: tuple(_figures_of(by_trial.get(trial, {}))) for trial in sorted(alive)},
        drift,
        tuple(Soaked(*trial_of(entry), _soak(entry)) for entry in recording.of("soak")),
        tuple(_stopped(recording, alive)),
        withheld(started["evidence"], served),
    )


# ── from entries ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Looks = dict[tuple[Point, bool], list[Round]]
"""By point, and whether it was the second look at that point."""

Rounds = dict[tuple[Trial, Point, bool], list[Round]]
"""The same by trial."""


def _rounds(recording: Recording, alive: set[Trial]) -> Rounds:
    whole = {
        (trial_of(entry), Point(**entry["point"]), entry["again"])
        for entry in recording.of("throughput-point")
        if trial_of(entry) in alive and entry["counted"] in (None, entry["usage"])
    }
    found: Rounds = {}
    for entry in recording.of("throughput-round"):
        key = (trial_of(entry), Point(**entry["point"]), entry["again"])
        if key in whole:
            found.setdefault(key, []).append(Round(**entry["figures"]))
    return found


def _by_trial(rounds: Rounds) -> dict[Trial, Looks]:
    found: dict[Trial, Looks] = {}
    for (trial, point, again), those in rounds.items():
        found.setdefault(trial, {})[point, again] = those
    return found


def _first(looks: Looks, *, again: bool) -> list[Round]:
    return next((those for (_, second), those in looks.items() if second is again), [])


def _speeds(rounds: list[Round]) -> list[float]:
    return [one.output_tok_s for one in rounds]


def _figures_of(looks: Looks) -> Iterator[Figures]:
    for (point, again), those in looks.items():
        if not again:
            yield figures(point, [those])


def _rows(rounds: Rounds, baseline: str, arms: list[str], seed: int) -> Iterator[Row]:
    """By point, and in the scenario's order of arms, the baseline first."""
    points = list(dict.fromkeys(point for _, point, again in rounds if not again))
    for point in points:
        boots = {
            arm: [
                those for (trial, at, again), those in rounds.items() if trial[0] == arm and at == point and not again
            ]
            for arm in sorted(arms, key=lambda name: name != baseline)
        }
        for arm, those in boots.items():
            if those:
                held = arm != baseline and boots.get(baseline)
                yield Row(arm, figures(point, those), ratio(those, held, seed) if held else None)


def _soak(entry: Entry) -> Soak:
    return Soak(**{**entry["soak"], "tenths": tuple(entry["soak"]["tenths"])})


def _stopped(recording: Recording, alive: set[Trial]) -> Iterator[str]:
    for entry in recording.of("measure-stopped"):
        yield f"{entry['arm']}, trial {entry['trial']}: {entry['doing']} was not measured: {entry['why']}"
    for entry in recording.of("throughput-point"):
        if trial_of(entry) in alive and entry["counted"] not in (None, entry["usage"]):
            counted, usage = entry["counted"], entry["usage"]
            yield (
                f"{entry['arm']}, trial {entry['trial']}: {Point(**entry['point'])} is left out: the answers' usage says "
                f"{usage['prompt']:,} + {usage['output']:,} tokens, the server's counters {counted['prompt']:,} + {counted['output']:,}"
            )
