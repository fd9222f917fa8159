"""`report.json`: its record, which is the contract.

`report/model.py` adds what only other formats need.

`python -m vllm_repro.report.json_report` prints its JSON Schema. Times are in seconds, sizes in
bytes. Later versions may add keys.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from vllm_repro.client.sdk import SdkView
from vllm_repro.conversion import convert
from vllm_repro.host.machine import Gpu, GpuUse
from vllm_repro.report.measurements import ArmSpeed, LoadBoot, MeasureReport, PhaseCounters
from vllm_repro.servers.base import Replaced
from vllm_repro.servers.witness import Patched
from vllm_repro.trigger.trigger import Amounts
from vllm_repro.verdict.outcome import Death, Outcome, Outlasted
from vllm_repro.verdict.throughput import Figures, Ratio, Spread, ThroughputChange
from vllm_repro.verdict.verdict import Expected, Result, Standing, Verdict


class TriggerJson(Struct, frozen=True, kw_only=True):
    """Evidence that the boundary was crossed, or that it was not."""

    crossed: bool
    evidence: tuple[str, ...]
    amounts: tuple[Amounts, ...] = ()


class PointJson(Struct, frozen=True, kw_only=True):
    """Throughput at one load: medians over rounds."""

    # Tokens of each prompt and answer, and requests at once
    prompt: int
    output: int
    concurrency: int
    # Rounds that count
    rounds: int
    output_tok_s: float | None
    req_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    itl_s: float | None
    itl_p99_s: float | None
    e2e_s: float | None = None
    # share of a core that the client used
    cpu: float | None = None
    # most by which the client was late
    late_s: float | None
    # low and high, by the field above
    quartiles: Mapping[str, tuple[float, float] | None]


class TrialThroughputJson(PointJson, frozen=True, kw_only=True):
    """Throughput of one trial: its first load, and all of them."""

    points: tuple[PointJson, ...]


class CountersJson(Struct, frozen=True, kw_only=True):
    """Counters of the server in one phase (tokens, cache hits, preemptions); null: not reported."""

    # "workload", or "warm-up" and "rounds" of a load
    phase: str
    # The load, as in `PointJson`; null in the workload
    prompt: int | None = None
    output: int | None = None
    concurrency: int | None = None
    prompt_tokens: int
    generation_tokens: int
    # highest share of the KV cache in use, read twice a second
    kv_most: float | None = None
    cache_hits: int | None = None
    cache_queries: int | None = None
    preemptions: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    # Leased cards, read every 5 s: highest memory, temperature and power, lowest clock
    gpus: GpuUse | None = None


class TrialJson(Struct, frozen=True, kw_only=True):
    """One trial in `report.json`: one boot of an arm with its workload, and its outcome."""

    number: int = field(name="trial")
    outcome: Outcome
    phase: str | None
    trigger: TriggerJson
    death: Death | None
    # What a program sees that sends the request through the `openai` SDK; null without a crash
    client_saw: SdkView | None
    # Until the server was ready; null if it never was
    boot_s: float | None
    duration_s: float | None
    # Counts: `sent`, `ok` (answered completely) and `failed`
    requests: Mapping[str, int]
    # HTTP results in the order of arrival, runs of equal ones folded
    answers: tuple[str, ...]
    # Result of the output check in a word or two
    output: str | None
    throughput: TrialThroughputJson | None
    counters: tuple[CountersJson, ...] = ()
    # Relative to the run's folder
    log: str
    # Logs of further nodes, by rank from 1
    rank_logs: tuple[str, ...]
    # Servers of further nodes that kept running after the first one's end
    outlasted: tuple[Outlasted, ...]
    why: str
    # What the engine was doing if it died after its workload
    during: str
    # What the signature's named groups caught of the message
    captured: Mapping[str, str]
    # Settings in the boot log on which these bugs depend
    boot: str


@dataclass(frozen=True, kw_only=True)
class PatchedFile(Patched):
    """A patched file of vLLM as the server's process found it."""

    # Whether a process of the server imported it; unset if nobody looked
    imported: bool | UnsetType = UNSET


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerReport:
    """The server of an arm. None: unknown, or it has none."""

    kind: str | None = None
    image: str | None = None
    digest: str | None = None
    # A value of `ServedWeights`: `real`, `random`, ...
    weights: str | None = None
    vllm_version: str | None = None
    # The vLLM as the user named it, if it is no release
    source: str | None = None
    # The release whose compiled parts it runs, if it is another one
    compiled: str | None = None
    argv: tuple[str, ...] = ()
    # Variables that were set on top of the environment
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    replaced: tuple[Replaced, ...] = ()
    patched: tuple[PatchedFile, ...] = ()


class ArmJson(Struct, frozen=True, kw_only=True):
    """One arm in `report.json`: its command, its server, its trials and their result."""

    name: str
    expected: Expected
    command: str
    # From the reported command, each with its reason
    differences: tuple[str, ...]
    # What its first trial sent
    requests: tuple[str, ...]
    server: ServerReport
    result: Result
    # Trials that showed the bug, of the `n` that decide
    k: int
    n: int
    # The sentence that these numbers support
    bound: str
    # vLLM's source is changed
    patched: bool
    trials: tuple[TrialJson, ...]
    # Null if the arm was not booted for its load alone
    load: LoadJson | None = None


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machine that a run was made on."""

    os: str
    python: str
    cpus: int
    # In units of 2**30 bytes
    memory_gb: float
    # Version of the engine
    docker: str | None
    gpus: tuple[Gpu, ...]
    driver: str | None


@dataclass(frozen=True, kw_only=True)
class ComparedPatch:
    """Failures of an arm with one patch, or with the unchanged release."""

    arm: str
    # False for the release as it is
    patched: bool
    # Boots that failed, of `boots`
    failed: int
    boots: int
    # Result for the patch, such as `fixed` or `still failing`
    reading: str
    # Names of the requests that failed
    requests: tuple[str, ...]


class RatioJson(Struct, frozen=True, kw_only=True):
    """Output tokens per second of an arm over those of the baseline arm, with the 95 % interval."""

    arm: str
    prompt: int
    output: int
    concurrency: int
    ratio: float
    low: float
    high: float
    # Rounds and trials of the arm that has fewer
    n: int
    boots: int
    change: ThroughputChange


class ThroughputJson(Struct, frozen=True, kw_only=True):
    """Throughput of a run's arms beside the baseline arm and beside the arm with the bug."""

    # What the figures are of: weights and device
    label: str = ""
    baseline_arm: str
    ratios: tuple[RatioJson, ...]
    # The arm with the bug, and what the other arms cost beside it; null if it has no figure
    bug_arm: str | None = None
    prices: tuple[RatioJson, ...] = ()


class LoadJson(LoadBoot, frozen=True, kw_only=True):
    """The boot of an arm for its load alone, with its throughput."""

    throughput: TrialThroughputJson | None


class RunJson(Struct, frozen=True, kw_only=True):
    """The whole of `report.json`, schema 1: one run with its arms and its verdict."""

    schema: Literal[1] = 1
    scenario: str
    issue: str
    verdict: Verdict
    because: str
    # What the arms that lived show beside one that died, a sentence each
    comparisons: tuple[str, ...]
    expected: bool
    # With `expected: false`, the run is undecided and no surprise
    undecided: bool
    evidence: str
    rehearsal: bool
    # As a server reported it, else as asked for
    vllm_version: str | None
    # What the scenario declares of this version
    standing: Standing
    # False if the rehearsal engine does not have the bug
    imitated: bool
    harness_version: str
    started_at: str
    duration_s: float
    # An anonymous id
    host: str
    environment: Environment
    arms: tuple[ArmJson, ...]
    compared_patches: tuple[ComparedPatch, ...]
    throughput: ThroughputJson | None
    # Why figures are no claim
    throughput_withheld: str | None
    infra: tuple[str, ...]
    # The command that repeats the run
    reproduce: str
    # The signal that ended the run
    interrupted: str | None
    # The journal ends early, or has unreadable lines
    journal_cut: bool

    @property
    def as_expected(self) -> bool | None:
        """Return True if the verdict is as expected, False for a surprise, None if undecided."""
        return None if self.undecided else self.expected


def report_dict(report: RunJson) -> dict[str, Any]:
    """Return the content of `report.json` as dicts and lists, without what `RunReport` adds."""
    return plain(convert(report, RunJson, from_attributes=True))


def plain(record: Struct) -> dict[str, Any]:
    """Return a record as plain dicts and lists."""
    # Not through msgspec's encoder: a journal may contain lone surrogates, which it refuses.
    return dict(json.loads(json.dumps(msgspec.to_builtins(record))))


def counters_of(phase: PhaseCounters) -> CountersJson:
    """Return the server's counters of one phase in the form of `report.json`."""
    point = asdict(phase.point) if phase.point else {}
    return CountersJson(phase=phase.phase, gpus=phase.gpus, **point, **asdict(phase.counted))


def trial_throughput(
    measured: MeasureReport | None, arm: str, trial: int
) -> TrialThroughputJson | None:
    """Return a trial's throughput for `report.json`; None if it has none, or if withheld."""
    known = measured is not None and not measured.withheld
    figures = measured.trials.get((arm, trial)) if measured and known else None
    if not figures:
        return None
    points = tuple(map(_point, figures))
    return TrialThroughputJson(**msgspec.structs.asdict(points[0]), points=points)


def _point(figures: Figures) -> PointJson:
    """Return the figures of one load as medians over its rounds, with quartiles."""
    # All fields are spreads but the load and the number of boots.
    spreads: dict[str, Spread | None] = {
        name: value for name, value in vars(figures).items() if name not in ("point", "boots")
    }
    medians: dict[str, Any] = {name: spread and spread.median for name, spread in spreads.items()}
    return PointJson(
        **asdict(figures.point),
        **medians,
        rounds=figures.output_tok_s.n,
        quartiles={
            name: None if spread is None else (spread.low, spread.high)
            for name, spread in spreads.items()
        },
    )


def throughput_of(measured: MeasureReport | None) -> ThroughputJson | None:
    """Return the ratios between arms for `report.json`; None without a figure, or if withheld."""
    if measured is None or measured.withheld or not measured.speeds:
        return None
    return ThroughputJson(
        label=measured.label,
        baseline_arm=measured.baseline,
        ratios=_ratios(measured, lambda speed: speed.ratio),
        bug_arm=measured.bug_arm or None,
        prices=_ratios(measured, lambda speed: speed.price),
    )


def _ratios(
    measured: MeasureReport, ratio_of: Callable[[ArmSpeed], Ratio | None]
) -> tuple[RatioJson, ...]:
    """Return the ratios that `ratio_of` picks, of each arm and load that has one."""
    return tuple(
        RatioJson(arm=speed.arm, **asdict(speed.figures.point), **asdict(ratio))
        for speed in measured.speeds
        if (ratio := ratio_of(speed)) is not None
    )


def load_of(measured: MeasureReport | None, arm: str) -> LoadJson | None:
    """Return the extra boot of an arm that only served the throughput load; None if it had none."""
    alone = measured.alone.get(arm) if measured else None
    if alone is None:
        return None
    return LoadJson(
        **msgspec.structs.asdict(alone), throughput=trial_throughput(measured, arm, alone.trial)
    )


if __name__ == "__main__":
    print(json.dumps(msgspec.json.schema(RunJson), indent=2))
