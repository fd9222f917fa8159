"""Throughput and soaks of a run, from its journal.

Counted are trials whose engine lived to the end, at points that were measured completely, and whose token usage agrees with the
server's own counters. Everything else stays in the journal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from vllm_repro.client.metrics import Counted, total
from vllm_repro.conversion import convert
from vllm_repro.host.machine import GpuUse, worst_use
from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.report.answers import TrialId, trial_id
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.output import ServedWeights
from vllm_repro.verdict.soak import Soak
from vllm_repro.verdict.throughput import (
    LEAST_ROUNDS,
    STEADY,
    Figures,
    Point,
    Ratio,
    Round,
    disagreements,
    figures,
    ratio,
    withheld,
)
from vllm_repro_diagnosis.evidence import Evidence

__all__ = ["ArmSpeed", "MeasureReport", "PhaseCounters", "measurements", "merged", "phase_counters"]


_NOT_COMPARED = "arms are not compared: their servers reported different releases:"


@dataclass(frozen=True, kw_only=True)
class ArmSpeed:
    """The throughput of an arm at a point. ratio: to the baseline arm; None for the baseline, or if it was not measured there."""

    arm: str
    figures: Figures
    ratio: Ratio | None


@dataclass(frozen=True, kw_only=True)
class PhaseCounters:
    """Counts of the server in a phase of a trial: "workload", "soak", or "warm-up" and "rounds" of a point.

    again: the point was measured again at the end. gpus: the leased cards meanwhile, of readings every five seconds beside a load.
    """

    phase: str
    point: Point | None
    again: bool
    counted: Counted
    gpus: GpuUse | None = None


def phase_counters(recording: Recording) -> dict[TrialId, tuple[PhaseCounters, ...]]:
    """Return the phases of each trial, the rounds of a point added up."""
    parts: dict[tuple[TrialId, str, Point | None, bool], list[PhaseCounters]] = {}
    for entry in recording.of("counters"):
        one = PhaseCounters(
            phase=entry["phase"],
            point=_point(entry) if entry.get("point") else None,
            again=entry.get("again", False),
            counted=convert(entry["counted"], Counted),
            gpus=convert(entry.get("gpus"), GpuUse | None),
        )
        parts.setdefault((trial_id(entry), one.phase, one.point, one.again), []).append(one)
    found: dict[TrialId, tuple[PhaseCounters, ...]] = {}
    for (trial, *_), phases in parts.items():
        found[trial] = (*found.get(trial, ()), merged(phases))
    return found


def merged(phases: Sequence[PhaseCounters]) -> PhaseCounters:
    """Return one or more phases of a kind as one: counts added up, the worst of the cards."""
    counted = total([one.counted for one in phases])
    return replace(phases[0], counted=counted, gpus=worst_use([one.gpus for one in phases if one.gpus]))


@dataclass(frozen=True, kw_only=True)
class MeasureReport:
    """Everything that a run measured. rehearsal: every figure is shown beside that word.

    withheld: why the figures are no claim about vLLM, as a sentence; empty if they are one. drift: by trial, the speed at the
    first point when it was measured again at the end, over that of the first time. stopped: sentences about what has no figure, or a
    doubtful one.
    """

    baseline: str
    speeds: tuple[ArmSpeed, ...]
    trials: Mapping[TrialId, tuple[Figures, ...]]
    drift: Mapping[TrialId, float]
    soaks: Mapping[TrialId, Soak]
    # Counts of the server in the rounds of a load, by load and arm
    counted: Mapping[tuple[Point, str], PhaseCounters]
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
    rounds = _counted(recording, alive)
    versions = sorted({str(version) for key in rounds if (version := ended[key[0]].get("version"))})
    weights = {entry.get("weights") for entry in ended.values() if trial_id(entry) in alive}
    names = [arm["name"] for arm in started["arms"]]
    random = {ServedWeights.DUMMY, ServedWeights.MADE} & weights
    served = ServedWeights.DUMMY if random else None if None in weights else ServedWeights.REAL
    return MeasureReport(
        baseline=baseline,
        # Servers of different releases are not compared.
        speeds=tuple(_speeds(rounds, baseline if len(versions) < 2 else "", names, started["seed"])),
        trials={trial: tuple(_trial_figures(rounds, trial)) for trial in sorted(alive)},
        drift=_drift(rounds),
        soaks={trial_id(entry): convert(entry["soak"], Soak) for entry in recording.of("soak")},
        counted=_round_counters(recording, ended, names),
        stopped=(*_stopped(recording, alive), *([f"{_NOT_COMPARED} {', '.join(versions)}"] if versions[1:] else ())),
        withheld=withheld(started["evidence"], served),
        rehearsal=started["evidence"] == Evidence.REHEARSAL,
    )


def _round_counters(
    recording: Recording, ended: Collection[TrialId], arms: list[str]
) -> dict[tuple[Point, str], PhaseCounters]:
    """Return the counts of finished trials, in the order of loads and then of arms."""
    parts: dict[tuple[Point, str], list[PhaseCounters]] = {}
    for trial, phases in phase_counters(recording).items():
        for phase in phases if trial in ended else ():
            if phase.phase == "rounds" and phase.point and not phase.again:
                parts.setdefault((phase.point, trial[0]), []).append(phase)
    order = sorted(parts, key=lambda part: (part[0], arms.index(part[1])))
    return {part: merged(parts[part]) for part in order}


_Rounds = dict[tuple[TrialId, Point, bool], list[Round]]
"""By trial, point, and whether the point was measured again at the end."""


def _point(entry: Entry) -> Point:
    return convert(entry["point"], Point)


def _key(entry: Entry) -> tuple[TrialId, Point, bool]:
    return trial_id(entry), _point(entry), entry["again"]


def _rounds(recording: Recording) -> _Rounds:
    found: _Rounds = {}
    for entry in recording.of("throughput-round"):
        found.setdefault(_key(entry), []).append(convert(entry["figures"], Round))
    return found


def _counted(recording: Recording, alive: set[TrialId]) -> _Rounds:
    """Return the rounds that count."""
    complete = {
        _key(entry)
        for entry in recording.of("throughput-point")
        if trial_id(entry) in alive and entry["counted"] in (None, entry["usage"])
    }
    good = {
        key: [one for one in rounds if not one.late(key[1])]
        for key, rounds in _rounds(recording).items()
        if key in complete and not any(one.limited for one in rounds)
    }
    return {key: rounds for key, rounds in good.items() if len(rounds) >= LEAST_ROUNDS}


def _left_out(recording: Recording) -> Iterator[str]:
    """Yield what the client spoiled, with the worst reason."""
    for ((arm, trial), point, again), rounds in _rounds(recording).items():
        where = f"{arm}, trial {trial}: {point}{', measured again,' if again else ''}"
        limited = [one for one in rounds if one.limited]
        late = [one for one in rounds if one.late(point)]
        if limited:
            yield f"{where} is left out: {max(limited, key=lambda one: one.cpu + one.queued_s / one.wall_s).limited}"
        elif late:
            why = max(late, key=lambda one: one.edge_s / one.wall_s).late(point)
            spoilt = f"{len(late)} of {len(rounds)} rounds"
            left = len(rounds) - len(late)
            yield (
                f"{where} is left out: in {spoilt} {why}"
                if left < LEAST_ROUNDS
                else f"{where}: {spoilt} are left out: {why}"
            )


def _apart(recording: Recording) -> Iterator[str]:
    """Yield the points at which client and server disagree about latencies in most rounds."""
    found: dict[tuple[TrialId, Point, bool], list[list[str]]] = {}
    for entry in recording.of("throughput-round"):
        one = disagreements(convert(entry["figures"], Round), entry.get("latencies") or {})
        found.setdefault(_key(entry), []).append(one)
    for ((arm, trial), point, _), rounds in found.items():
        apart = [one for one in rounds if one]
        if 2 * len(apart) > len(rounds):
            counted = f"{len(apart)} of {len(rounds)} rounds"
            yield f"{arm}, trial {trial}: {point}: client and server disagree in {counted}: {'; '.join(apart[-1])}"


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
    yield from _left_out(recording)
    yield from _apart(recording)
    for entry in recording.of("throughput-point"):
        if (apart := entry.get("unsteady", 0.0)) > STEADY:
            warm_ups = f"the last two of {entry['warm_ups']} warm-up rounds differ by {100 * apart:.0f} %"
            yield f"{entry['arm']}, trial {entry['trial']}: {_point(entry)} was not steady when it was measured: {warm_ups}"
        if trial_id(entry) in alive and entry["counted"] not in (None, entry["usage"]):
            counted, usage = entry["counted"], entry["usage"]
            yield (
                f"{entry['arm']}, trial {entry['trial']}: {_point(entry)} is left out: by usage the answers have "
                f"{usage['prompt']:,} + {usage['output']:,} tokens, by the server's counters {counted['prompt']:,} + {counted['output']:,}"
            )
