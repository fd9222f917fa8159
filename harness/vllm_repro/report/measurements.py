"""Throughput of a run, from its journal.

A trial counts if its engine lived to the end, and its token usage agrees with the server's own
counters. A point counts if it was measured completely and became steady. Everything else stays in
the journal. An arm that died of its workload has the figures of its boot for the load alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from msgspec import Struct

from vllm_repro.client.metrics import Counted, total
from vllm_repro.conversion import convert
from vllm_repro.host.host_id import hardware
from vllm_repro.host.machine import GpuUse, worst_use
from vllm_repro.journal.journal import Entry, Recording
from vllm_repro.report.answers import TrialId, trial_id
from vllm_repro.verdict.outcome import Death, Outcome
from vllm_repro.verdict.output import ServedWeights
from vllm_repro.verdict.throughput import (
    DRIFT,
    LEAST_ROUNDS,
    Figures,
    Point,
    Ratio,
    Round,
    drifted,
    figures,
    label_of,
    ratio,
    withheld,
)
from vllm_repro.verdict.verdict import Expected
from vllm_repro_diagnosis.evidence import Evidence

_SHAPE = re.compile(r"(?:dummy|made): (\d+) layers?\b")


@dataclass(frozen=True, kw_only=True)
class ArmSpeed:
    """The throughput of an arm at one load, and its ratios to the baseline and the buggy arm."""

    arm: str
    figures: Figures
    # to the baseline arm; None for the baseline, or if it was not measured there
    ratio: Ratio | None
    # to the first arm that has the bug: what the arm costs as a workaround
    price: Ratio | None


@dataclass(frozen=True, kw_only=True)
class PhaseCounters:
    """Counters of the server and its GPUs in one phase of a trial."""

    # "workload", or "warm-up" and "rounds" of a point
    phase: str
    point: Point | None
    counted: Counted
    # the leased cards meanwhile, of readings every five seconds beside a load
    gpus: GpuUse | None = None


def phase_counters(recording: Recording) -> dict[TrialId, tuple[PhaseCounters, ...]]:
    """Return each trial's server counters, one item a phase, with the rounds of a load added up.

    Trials without counters are left out.
    """
    parts: defaultdict[tuple[TrialId, str, Point | None], list[PhaseCounters]] = defaultdict(list)
    for entry in recording.of("counters"):
        if not _is_former(entry):
            phase = PhaseCounters(
                phase=entry["phase"],
                point=convert(entry.get("point"), Point | None),
                counted=convert(entry["counted"], Counted),
                gpus=convert(entry.get("gpus"), GpuUse | None),
            )
            parts[trial_id(entry), phase.phase, phase.point].append(phase)
    trials: dict[TrialId, tuple[PhaseCounters, ...]] = {}
    for (trial, *_), phases in parts.items():
        trials[trial] = (*trials.get(trial, ()), merged(phases))
    return trials


def merged(phases: Sequence[PhaseCounters]) -> PhaseCounters:
    """Return counters of one phase and load as one: counts added up, the worst GPU readings."""
    counted = total([phase.counted for phase in phases])
    return replace(
        phases[0], counted=counted, gpus=worst_use([phase.gpus for phase in phases if phase.gpus])
    )


class LoadBoot(Struct, frozen=True, kw_only=True):
    """An arm's boot that only served the throughput load: its trials died before the load."""

    trial: int
    outcome: Outcome
    why: str
    boot_s: float | None
    death: Death | None
    # Relative to the run's folder
    log: str


@dataclass(frozen=True, kw_only=True)
class MeasureReport:
    """The throughput that a run measured, and sentences about what was not measured."""

    # what the figures are of: weights and device; empty in a rehearsal
    label: str
    # the arm that `ArmSpeed.ratio` compares with; empty without one
    baseline: str
    # the arm that `ArmSpeed.price` compares with; empty if none has a figure
    bug_arm: str
    speeds: tuple[ArmSpeed, ...]
    # by arm: its boot for the load alone
    alone: Mapping[str, LoadBoot]
    # by trial whose engine lived: a figure for each load that counts
    trials: Mapping[TrialId, tuple[Figures, ...]]
    # counts of the server in the rounds of a load, by load and arm
    counted: Mapping[tuple[Point, str], PhaseCounters]
    # sentences about what has no figure, or a doubtful one
    stopped: tuple[str, ...]
    # why the figures are no claim about vLLM, as a sentence; empty if they are one
    withheld: str
    # a server's log names a model with a mixture of experts
    experts: bool
    # every figure is shown beside that word
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
    """Return the throughput in a run's journal; None if the run was to measure none."""
    started = recording.first("run-started")
    options = started.get("wishes") if started is not None else None
    if started is None or not options or not options["throughput"] or not started.get("loads"):
        return None
    parts = _point_rounds(recording)
    alone = {entry["arm"]: entry for entry in recording.of("load-ended")}
    ended = {trial_id(entry): entry for entry in (*recording.of("trial-ended"), *alone.values())}
    alive = {trial for trial, entry in ended.items() if Outcome(entry["outcome"]).facts.alive}
    rounds = {key: part.rounds for key, part in parts.items() if key[0] in alive and part.counts}
    stopped = [
        f"{entry['arm']}, trial {entry['trial']}: {entry['doing']} was not measured: {entry['why']}"
        for entry in recording.of("measure-stopped")
    ]
    for key, part in parts.items():
        stopped += part.notes(key)
    versions = sorted({str(version) for key in rounds if (version := ended[key[0]].get("version"))})
    if len(versions) > 1:
        stopped.append(
            "arms are not compared: their servers reported different releases:"
            f" {', '.join(versions)}"
        )
    names = [arm["name"] for arm in started["arms"]]
    measured = {arm for (arm, _), _ in rounds}
    with_bug = {arm["name"] for arm in started["arms"] if Expected(arm["expected"]).has_bug}
    bug_arm = next((arm for arm in names if arm in with_bug & measured), "")
    by_life = sorted(names, key=alone.__contains__)
    usual = next((arm for arm in by_life if arm in measured), "")
    baseline = str(started["loads"][0]["baseline"]) or usual
    rehearsal = started["evidence"] == Evidence.REHEARSAL
    references = (baseline, bug_arm) if len(versions) < 2 else ("", "")
    return MeasureReport(
        label="" if rehearsal else _label(recording, started, list(ended.values())),
        baseline=baseline,
        bug_arm=bug_arm,
        speeds=tuple(_speeds(rounds, references, names, started["seed"])),
        alone={arm: convert(entry.fields, LoadBoot) for arm, entry in alone.items()},
        trials={trial: tuple(_trial_figures(rounds, trial)) for trial in sorted(alive)},
        counted=_round_counters(recording, ended, names),
        stopped=tuple(stopped),
        withheld=withheld(started["evidence"]),
        experts=any((entry.get("boot") or {}).get("experts") for entry in ended.values()),
        rehearsal=rehearsal,
    )


def why_no_throughput(evidence: str, measured: MeasureReport | None) -> str:
    """Return why a run has no throughput to show; empty if it has. evidence: as in `Evidence`."""
    if reason := withheld(evidence):
        return reason
    if measured is None:
        return "no load was sent; --throughput sends one"
    return "" if measured.speeds else "no arm reached a steady speed"


def _label(recording: Recording, started: Entry, ended: Sequence[Entry]) -> str:
    """Return the weights, layers and device that a run's figures were measured on."""
    weights = {
        kind for entry in ended if (kind := convert(entry.get("weights"), ServedWeights | None))
    }
    begun = next(recording.of("trial-started"), None)
    depth = begun.get("depth") if begun is not None else None
    # an older journal has the number of layers in words alone
    if depth is None and begun is not None and (shape := _SHAPE.match(begun.get("weights") or "")):
        depth = (int(shape[1]), 0)
    kind = ServedWeights.REAL if ServedWeights.REAL in weights else min(weights, default=None)
    leased = recording.first("gpus-free")
    cards = started["machine"]["gpus"] if started["evidence"] == Evidence.GPU else []
    if leased is not None and leased["gpus"]:
        cards = cards[: len(leased["gpus"])]
    device = hardware({**started["machine"], "gpus": cards})
    return label_of(kind, depth and (depth[0], depth[1]), device)


def _round_counters(
    recording: Recording, ended: Collection[TrialId], arms: Sequence[str]
) -> dict[tuple[Point, str], PhaseCounters]:
    """Return the server's counters in the rounds of finished trials, by load and arm.

    ended: the finished trials. arms: their order in the result.
    """
    parts: defaultdict[tuple[Point, str], list[PhaseCounters]] = defaultdict(list)
    for trial, phases in phase_counters(recording).items():
        for phase in phases if trial in ended else ():
            if phase.phase == "rounds" and phase.point:
                parts[phase.point, trial[0]].append(phase)
    order = sorted(parts, key=lambda part: (part[0], arms.index(part[1])))
    return {part: merged(parts[part]) for part in order}


_Key = tuple[TrialId, Point]


@dataclass
class _PointRounds:
    """The measured rounds of one trial at one load."""

    # those that the client did not falsify, and the others
    rounds: list[Round] = field(default_factory=list)
    late: list[Round] = field(default_factory=list)
    # written when the point was measured completely
    end: Entry | None = None

    @property
    def limited(self) -> list[Round]:
        """Return the rounds whose speed the client, not the server, may have limited."""
        return [measured for measured in (*self.rounds, *self.late) if measured.limited]

    @property
    def miscounted(self) -> bool:
        """Return True if the server's token counters contradict the `usage` of its answers."""
        return self.end is not None and self.end["counted"] not in (None, self.end["usage"])

    @property
    def drifts(self) -> bool:
        """Return True if the load never became steady.

        False if the client limited a round, or too few rounds are complete.
        """
        speeds = [measured.output_tok_s for measured in self.rounds]
        enough = len(speeds) >= LEAST_ROUNDS and not self.limited
        return self.end is not None and enough and drifted(self.end.get("unsteady", 0.0), speeds)

    @property
    def counts(self) -> bool:
        """Return True if the rounds give a figure: complete, steady, not limited by the client."""
        whole = self.end is not None and not self.miscounted and not self.drifts
        return whole and not self.limited and len(self.rounds) >= LEAST_ROUNDS

    def notes(self, key: _Key) -> Iterator[str]:
        """Yield sentences on why rounds are left out; none if all are used. key: trial and load."""
        (arm, trial), point = key
        where = f"{arm}, trial {trial}: {point}"
        if self.limited:
            worst = max(
                self.limited,
                key=lambda measured: measured.cpu + measured.queued_s / measured.wall_s,
            )
            yield f"{where} is left out: {worst.limited}"
        elif self.late:
            why = max(self.late, key=lambda measured: measured.edge_s / measured.wall_s).late
            late = f"{len(self.late)} of {len(self.rounds) + len(self.late)} rounds"
            few = len(self.rounds) < LEAST_ROUNDS
            yield (
                f"{where} is left out: in {late} {why}"
                if few
                else f"{where}: {late} are left out: {why}"
            )
        if self.end is not None and self.drifts:
            yield (
                f"{where} is left out: it never became steady: the last two of"
                f" {self.end['warm_ups']} warm-up rounds differ by"
                f" {100 * self.end['unsteady']:.0f} %, and the halves of the rounds by more than"
                f" {100 * DRIFT:.0f} %"
            )
        if self.end is not None and self.miscounted:
            usage, counted = (
                f"{tokens['prompt']:,} + {tokens['output']:,}"
                for tokens in (self.end["usage"], self.end["counted"])
            )
            yield (
                f"{where} is left out: by usage the answers have {usage} tokens, by the server's"
                f" counters {counted}"
            )


def _point_rounds(recording: Recording) -> dict[_Key, _PointRounds]:
    """Return the measured rounds by trial and load."""
    parts: defaultdict[_Key, _PointRounds] = defaultdict(_PointRounds)
    for key, entry in _at_points(recording, "throughput-round"):
        measured = convert(entry["figures"], Round)
        (parts[key].late if measured.late else parts[key].rounds).append(measured)
    for key, entry in _at_points(recording, "throughput-point"):
        parts[key].end = entry
    return parts


def _at_points(recording: Recording, event: str) -> Iterator[tuple[_Key, Entry]]:
    """Yield ((trial, load), entry) for the entries of one event, without those of `_is_former`."""
    for entry in recording.of(event):
        if not _is_former(entry):
            yield (trial_id(entry), convert(entry["point"], Point)), entry


def _is_former(entry: Entry) -> bool:
    """Return True for a measurement that only older journals have: a rate, a soak, a repeat."""
    point = entry.get("point") or {}
    return bool(point.get("rate") or entry.get("again") or entry.get("phase") == "soak")


_Rounds = Mapping[_Key, Sequence[Round]]


def _trial_figures(rounds: _Rounds, trial: TrialId) -> Iterator[Figures]:
    """Yield the figures of one trial, for one load after the other. rounds: those that count."""
    for (measured_trial, point), measured in rounds.items():
        if measured_trial == trial:
            yield figures(point, [measured])


def _speeds(
    rounds: _Rounds, references: tuple[str, str], arms: Sequence[str], seed: int
) -> Iterator[ArmSpeed]:
    """Yield the speed of each arm at each load: by load, the baseline first, then as `arms`.

    rounds: those that count. references: the baseline and the arm with the bug, to which each other
    arm is compared. seed: of the bootstrap intervals.
    """
    baseline, _ = references
    points: defaultdict[Point, defaultdict[str, list[Sequence[Round]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for ((arm, _), point), measured in rounds.items():
        points[point][arm].append(measured)
    for point, trials in points.items():
        known = sorted(trials.keys() & set(arms), key=arms.index)
        for arm in sorted(known, key=lambda name: name != baseline):
            to_baseline, to_bug_arm = (
                ratio(trials[arm], trials[reference], seed)
                if reference in trials and arm != reference
                else None
                for reference in references
            )
            yield ArmSpeed(
                arm=arm,
                figures=figures(point, trials[arm]),
                ratio=to_baseline,
                price=to_bug_arm,
            )
