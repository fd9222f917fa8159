"""`report.json`: its record, which is the contract, and how it is made from a report.

`python -m vllm_repro.report.json_report` prints its JSON Schema. Times are in seconds, sizes in bytes. Later versions may add keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

from vllm_repro.client.sdk import SdkView
from vllm_repro.conversion import convert
from vllm_repro.host.machine import GpuUse
from vllm_repro.report.measurements import MeasureReport, PhaseCounters
from vllm_repro.report.model import ArmReport, Environment, RunReport, ServerReport, TrialReport
from vllm_repro.report.patches import ComparedPatch, compared_patches
from vllm_repro.trigger.trigger import Amounts
from vllm_repro.verdict.outcome import Death, Outcome, Outlasted
from vllm_repro.verdict.throughput import Figures, Spread, ThroughputChange
from vllm_repro.verdict.verdict import ArmResult, Expected, Result, Standing, Verdict

__all__ = ["ArmJson", "RunJson", "counts", "plain", "record", "report_dict"]

_Record = TypeVar("_Record", bound=Struct)


class TriggerJson(Struct, frozen=True, kw_only=True):
    """Evidence that the boundary was crossed, or that it was not."""

    crossed: bool
    evidence: tuple[str, ...]
    amounts: tuple[Amounts, ...] = ()


class PointJson(Struct, frozen=True, kw_only=True):
    """Throughput at one load: medians over rounds, and their quartiles (low, high).

    cpu, late_s: the share of a core that the client itself used, and the most by which it was late.
    """

    prompt: int
    output: int
    concurrency: int
    rounds: int
    output_tok_s: float | None
    req_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    itl_s: float | None
    itl_p99_s: float | None
    e2e_s: float | None = None
    cpu: float | None = None
    late_s: float | None
    quartiles: Mapping[str, tuple[float, float] | None]


class TrialThroughputJson(PointJson, frozen=True, kw_only=True):
    """Throughput of one trial: its first load, and all of them."""

    points: tuple[PointJson, ...]


class CountersJson(Struct, frozen=True, kw_only=True):
    """Counts of the server in a phase: "workload", or "warm-up" and "rounds" of a load; null: not reported.

    kv_most: the highest share of the KV cache in use, of readings twice a second. gpus: the
    leased cards beside a load, of readings every five seconds: highest memory, temperature and power of one, lowest clock.
    """

    phase: str
    prompt: int | None = None
    output: int | None = None
    concurrency: int | None = None
    prompt_tokens: int
    generation_tokens: int
    kv_most: float | None = None
    cache_hits: int | None = None
    cache_queries: int | None = None
    preemptions: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    gpus: GpuUse | None = None


class TrialJson(Struct, frozen=True, kw_only=True):
    """One trial.

    answers: HTTP results in the order of arrival, runs of equal ones folded. output: result of the output check. log: relative to the
    run's folder. rank_logs: of further nodes, by rank from 1. outlasted: servers of further nodes that kept running after the first one's
    end. during: what the engine was doing if it died after its workload. captured: what the signature's named groups caught of the message.
    client_saw: what a program sees that sends the request through the `openai` SDK; null without a crash.
    """

    trial: int
    outcome: Outcome
    phase: str | None
    trigger: TriggerJson
    death: Death | None
    client_saw: SdkView | None
    boot_s: float | None
    duration_s: float | None
    requests: Mapping[str, int]
    answers: tuple[str, ...]
    output: str | None
    throughput: TrialThroughputJson | None
    counters: tuple[CountersJson, ...] = ()
    log: str
    rank_logs: tuple[str, ...]
    outlasted: tuple[Outlasted, ...]
    why: str
    during: str
    captured: Mapping[str, str]
    boot: str


class ArmJson(Struct, frozen=True, kw_only=True):
    """One arm. k of the n trials that decide showed the bug. bound: the sentence that these numbers support. patched: in vLLM's source."""

    name: str
    expected: Expected
    command: str
    differences: tuple[str, ...]
    requests: tuple[str, ...]
    server: ServerReport
    result: Result
    k: int
    n: int
    bound: str
    patched: bool
    trials: tuple[TrialJson, ...]


class RatioJson(Struct, frozen=True, kw_only=True):
    """Output tokens per second of an arm over those of the baseline arm, with the 95 % interval."""

    arm: str
    prompt: int
    output: int
    concurrency: int
    ratio: float
    low: float
    high: float
    n: int
    boots: int
    change: ThroughputChange


class ThroughputJson(Struct, frozen=True, kw_only=True):
    """The ratios of a run."""

    baseline_arm: str
    ratios: tuple[RatioJson, ...]


class RunJson(Struct, frozen=True, kw_only=True):
    """`report.json`, schema 1.

    undecided: with `expected: false`, the run is undecided and no surprise. throughput_withheld: why figures are no claim. interrupted: the
    signal that ended the run. journal_cut: the journal is not whole. reproduce: the command that repeats the run. vllm_version: as a server
    reported it, else as asked for. standing: what the scenario declares of it. host: an anonymous id. imitated: False if the rehearsal
    engine does not have the bug.
    """

    schema: Literal[1] = 1
    scenario: str
    issue: str
    verdict: Verdict
    because: str
    comparisons: tuple[str, ...]
    expected: bool
    undecided: bool
    evidence: str
    rehearsal: bool
    vllm_version: str | None
    standing: Standing
    imitated: bool
    harness_version: str
    started_at: str
    duration_s: float
    host: str
    environment: Environment
    arms: tuple[ArmJson, ...]
    compared_patches: tuple[ComparedPatch, ...]
    throughput: ThroughputJson | None
    throughput_withheld: str | None
    infra: tuple[str, ...]
    reproduce: str
    interrupted: str | None
    journal_cut: bool


def report_dict(report: RunReport) -> dict[str, Any]:
    """Return the content of `report.json` as plain dicts and lists."""
    found = report.measured
    return plain(
        record(
            RunJson,
            report,
            verdict=report.verdict.verdict,
            because=report.verdict.because,
            expected=report.verdict.expected is True,
            undecided=report.verdict.expected is None,
            vllm_version=report.version,
            arms=[_arm(arm, found) for arm in report.arms],
            compared_patches=compared_patches(report),
            throughput=_throughput(found),
            throughput_withheld=(found.withheld if found else "") or None,
            journal_cut=report.cut,
        )
    )


def record(kind: type[_Record], source: object, **values: object) -> _Record:
    """Return a record with these values, and for its other fields the attributes of `source` that have their names."""
    named = {name: getattr(source, name) for name in kind.__struct_fields__ if hasattr(source, name)}
    return convert({**named, **values}, kind, from_attributes=True)


def plain(record: Struct) -> dict[str, Any]:
    """Return a record as plain dicts and lists."""
    # Not through msgspec's encoder: a journal may contain lone surrogates, which it refuses.
    content: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(record)))
    return content


def _arm(arm: ArmReport, found: MeasureReport | None) -> ArmJson:
    trials = [_trial(trial, arm.name, found) for trial in arm.trials]
    return record(ArmJson, arm, **counts(arm.result), patched=bool(arm.patches or arm.server.patched), trials=trials)


def counts(result: ArmResult) -> dict[str, object]:
    """Return the fields that say how often an arm crashed."""
    return {"result": result.result, "k": result.crashed, "n": result.conclusive, "bound": result.bound}


def _trial(trial: TrialReport, arm: str, found: MeasureReport | None) -> TrialJson:
    return record(
        TrialJson,
        trial,
        trial=trial.number,
        output=trial.output or None,
        throughput=_trial_throughput(found, arm, trial.number),
        counters=tuple(map(_counters, trial.counters)),
    )


def _counters(one: PhaseCounters) -> CountersJson:
    point = asdict(one.point) if one.point else {}
    return record(CountersJson, one.counted, phase=one.phase, gpus=one.gpus, **point)


def _trial_throughput(found: MeasureReport | None, arm: str, trial: int) -> TrialThroughputJson | None:
    figures = found.trials.get((arm, trial)) if found and not found.withheld else None
    if not figures:
        return None
    points = tuple(map(_point, figures))
    return record(TrialThroughputJson, points[0], points=points)


def _point(figures: Figures) -> PointJson:
    # the fields that are spreads: all but the load and the number of boots
    spreads: dict[str, Spread | None] = {
        name: value for name, value in vars(figures).items() if name not in ("point", "boots")
    }
    return record(
        PointJson,
        figures.point,
        rounds=figures.output_tok_s.n,
        **{name: spread and spread.median for name, spread in spreads.items()},
        quartiles={name: spread and (spread.low, spread.high) for name, spread in spreads.items()},
    )


def _throughput(found: MeasureReport | None) -> ThroughputJson | None:
    if found is None or found.withheld or not found.speeds:
        return None
    ratios = tuple(
        record(RatioJson, speed.ratio, arm=speed.arm, **asdict(speed.figures.point))
        for speed in found.speeds
        if speed.ratio is not None
    )
    return ThroughputJson(baseline_arm=found.baseline, ratios=ratios)


if __name__ == "__main__":
    print(json.dumps(msgspec.json.schema(RunJson), indent=2))
