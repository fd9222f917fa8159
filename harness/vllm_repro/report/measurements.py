"""Throughput and soaks of a run, from its journal.

Counted are trials whose engine lived to the end, at points that were measured completely, and whose token usage agrees with the
server's own counters. Everything else stays in the journal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import msgspec

from vllm_repro.evidence import Evidence
from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.report.answers import TrialId, trial_id
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.output import ServedWeights
from vllm_repro.verdict.soak import Soak
from vllm_repro.verdict.throughput import MOST_CPU, Figures, Point, Ratio, Round, figures, ratio, withheld

__all__ = ["ArmSpeed", "MeasureReport", "measurements"]


@dataclass(frozen=True, kw_only=True)
class ArmSpeed:
    """The throughput of an arm at a point. ratio: to the baseline arm; None for the baseline, or if it was not measured there."""

    arm: str
    figures: Figures
    ratio: Ratio | None


@dataclass(frozen=True, kw_only=True)
class MeasureReport:
    """Everything that a run measured. rehearsal: every figure is shown beside that word.

    withheld: why the figures are no claim about vLLM, as a sentence; empty if they are one. drift: by trial, the speed at the
    first point when it was measured again at the end, over that of the first time. stopped: sentences about what has no figure.
    """

    baseline: str
    speeds: tuple[ArmSpeed, ...]
    trials: Mapping[TrialId, tuple[Figures, ...]]
    drift: Mapping[TrialId, float]
    soaks: Mapping[TrialId, Soak]
    stopped: tuple[str, ...]
    withheld: str
    rehearsal: bool

    @property
    def shown(self) -> tuple[ArmSpeed, ...]:
        """Return the figures that a report may show."""
        return self.speeds if self.rehearsal or not self.withheld else ()

    @property
    def mark(self) -> str:
        """Return the mark beside a figure: ` (REHEARSAL)`, or nothing."""
        return " (REHEARSAL)" if self.rehearsal else ""


def measurements(recording: Recording) -> MeasureReport | None:
    """Return the measurements; None if the run asked for none."""
    started = recording.first("run-started")
    options = started.get("wishes") if started is not None else None
    if started is None or not options or not (options["throughput"] or options["soak"]):
        return None
    loads = started.get("loads") or ()
    baseline = str(loads[0]["baseline"]) if loads else ""
    ended = {trial_id(entry): entry for entry in recording.of("trial-ended")}
    alive = {trial for trial, entry in ended.items() if Outcome(entry["outcome"]).facts.alive}
    rounds = _rounds(recording, alive)
    weights = {entry.get("weights") for entry in ended.values() if trial_id(entry) in alive}
    random = {ServedWeights.DUMMY, ServedWeights.MADE} & weights
    served = ServedWeights.DUMMY if random else None if None in weights else ServedWeights.REAL
    return MeasureReport(
        baseline=baseline,
        speeds=tuple(_speeds(rounds, baseline, [arm["name"] for arm in started["arms"]], started["seed"])),
        trials={trial: tuple(_trial_figures(rounds, trial)) for trial in sorted(alive)},
        drift=_drift(rounds),
        soaks={trial_id(entry): msgspec.convert(entry["soak"], Soak) for entry in recording.of("soak")},
        stopped=tuple(_stopped(recording, alive)),
        withheld=withheld(started["evidence"], served),
        rehearsal=started["evidence"] == Evidence.REHEARSAL,
    )


_Rounds = dict[tuple[TrialId, Point, bool], list[Round]]
"""By trial, point, and whether the point was measured again at the end."""


def _point(entry: Entry) -> Point:
    return msgspec.convert(entry["point"], Point)


def _key(entry: Entry) -> tuple[TrialId, Point, bool]:
    return trial_id(entry), _point(entry), entry["again"]


def _busy(recording: Recording) -> dict[tuple[TrialId, Point, bool], float]:
    """Return the points at which the client was the limit, and the most of a core that it used in a round."""
    found: dict[tuple[TrialId, Point, bool], float] = {}
    for entry in recording.of("throughput-round"):
        if (cpu := entry["figures"].get("cpu", 0.0)) > MOST_CPU:
            found[_key(entry)] = max(cpu, found.get(_key(entry), 0.0))
    return found


def _rounds(recording: Recording, alive: set[TrialId]) -> _Rounds:
    busy = _busy(recording)
    complete = {
        key
        for entry in recording.of("throughput-point")
        if trial_id(entry) in alive and entry["counted"] in (None, entry["usage"])
        if (key := _key(entry)) not in busy
    }
    found: _Rounds = {}
    for entry in recording.of("throughput-round"):
        if (key := _key(entry)) in complete:
            found.setdefault(key, []).append(msgspec.convert(entry["figures"], Round))
    return found


def _trial_figures(rounds: _Rounds, trial: TrialId) -> Iterator[Figures]:
    for (of, point, again), own in rounds.items():
        if of == trial and not again:
            yield figures(point, [own])


def _drift(rounds: _Rounds) -> dict[TrialId, float]:
    speeds: dict[tuple[TrialId, bool], float] = {}
    for (trial, point, again), own in rounds.items():
        speeds.setdefault((trial, again), median(one.speed(point) for one in own))
    return {
        trial: speed / speeds[trial, False]
        for (trial, again), speed in speeds.items()
        if again and (trial, False) in speeds
    }


def _speeds(rounds: _Rounds, baseline: str, arms: list[str], seed: int) -> Iterator[ArmSpeed]:
    """Yield by point, then in the scenario's order of arms with the baseline first."""
    for at in dict.fromkeys(point for _, point, again in rounds if not again):
        boots: dict[str, list[list[Round]]] = {}
        for ((arm, _), point, again), own in rounds.items():
            if point == at and not again:
                boots.setdefault(arm, []).append(own)
        for arm in sorted(arms, key=lambda name: name != baseline):
            if arm in boots:
                compared = arm != baseline and baseline in boots
                yield ArmSpeed(
                    arm=arm,
                    figures=figures(at, boots[arm]),
                    ratio=ratio(at, boots[arm], boots[baseline], seed) if compared else None,
                )


def _stopped(recording: Recording, alive: set[TrialId]) -> Iterator[str]:
    for entry in recording.of("measure-stopped"):
        yield f"{entry['arm']}, trial {entry['trial']}: {entry['doing']} was not measured: {entry['why']}"
    for ((arm, trial), point, _), cpu in _busy(recording).items():
        yield f"{arm}, trial {trial}: {point} is left out: the client used {100 * cpu:.0f} % of a core, so it may have been the limit"
    for entry in recording.of("throughput-point"):
        if trial_id(entry) in alive and entry["counted"] not in (None, entry["usage"]):
            counted, usage = entry["counted"], entry["usage"]
            yield (
                f"{entry['arm']}, trial {entry['trial']}: {_point(entry)} is left out: by usage the answers have "
                f"{usage['prompt']:,} + {usage['output']:,} tokens, by the server's counters {counted['prompt']:,} + {counted['output']:,}"
            )
