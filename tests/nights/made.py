"""Rows for tests: one run of one arm by default."""

from __future__ import annotations

import dataclasses
from datetime import UTC, date, datetime, timedelta
from typing import Any

from msgspec.structs import replace

from tests.report_examples import REHEARSAL, report
from vllm_repro.host.machine import Gpu
from vllm_repro.report.json_report import ArmJson, PointJson, TrialThroughputJson
from vllm_repro.report.runs import Run, run_of
from vllm_repro.verdict.throughput import Point
from vllm_repro.verdict.verdict import Expected, Result, Standing, Verdict

_RUN = run_of(report(REHEARSAL))
_ARM = replace(_RUN.arms[0], command="", trials=())
_GPU = dataclasses.replace(
    _RUN.environment,
    gpus=(Gpu(name="NVIDIA H200", memory_gb=141.0, capability=9.0, driver="580.1"),),
)
_TRIAL = _RUN.arms[0].trials[0]
FIRST = date(2026, 9, 1)
POINT = Point(128, 512, 4)
NIGHTLY, RELEASE = "0.24.1rc1.dev{0}+gabc", "0.24.{0}"


def arm(
    crashed: int, boots: int, name: str = "reported", expected: Expected = Expected.DIES
) -> ArmJson:
    if not boots:
        result = Result.INCONCLUSIVE
    elif not crashed:
        result = Result.QUIET
    else:
        result = Result.REPRODUCES if crashed == boots else Result.FLAKY
    return replace(_ARM, name=name, expected=expected, result=result, k=crashed, n=boots)


def with_speed(of: ArmJson, speed: float, flags: str = "") -> ArmJson:
    """Return the arm with a boot that was measured."""
    none = dict.fromkeys(("req_s", "ttft_s", "tpot_s", "itl_s", "itl_p99_s", "late_s"))
    point = {
        "prompt": POINT.prompt,
        "output": POINT.output,
        "concurrency": POINT.concurrency,
        "rounds": 10,
        **none,
    }
    speeds: dict[str, Any] = {**point, "output_tok_s": speed, "quartiles": {}}
    measured = TrialThroughputJson(**speeds, points=(PointJson(**speeds),))
    return replace(of, command=flags, trials=(replace(_TRIAL, death=None, throughput=measured),))


def row(
    night: int,
    crashed: int,
    boots: int = 1,
    *,
    version: str | None = None,
    host: str = "aaaa0001",
    standing: Standing = Standing.UNKNOWN,
    scenario: str = "sco-hybrid",
    evidence: str = "gpu",
    hour: int = 2,
) -> tuple[date, Run]:
    """Return a run of a night counted from 0, whose arm died in `crashed` of `boots`.

    The default version is that night's nightly.
    """
    version = version or NIGHTLY.format(night)
    started = datetime(FIRST.year, FIRST.month, FIRST.day, hour, tzinfo=UTC) + timedelta(days=night)
    verdict = (
        Verdict.INCONCLUSIVE if not boots else Verdict.REPRODUCES if crashed else Verdict.QUIET
    )
    if crashed and standing is Standing.GOOD:
        verdict = Verdict.REGRESSED
    made = replace(
        _RUN,
        id=f"{scenario}/{started:%Y%m%dT%H%M%SZ}-{host[:6]}",
        scenario=scenario,
        started_at=f"{started:%Y-%m-%dT%H:%M:%SZ}",
        host=host,
        environment=_GPU,
        evidence=evidence,
        vllm_version=version,
        standing=standing,
        verdict=verdict,
        undecided=not boots,
        expected=bool(boots),
        because="because",
        arms=(arm(crashed, boots),),
    )
    return FIRST + timedelta(days=night), made


def measured(
    night: int,
    speeds: dict[str, float],
    *,
    host: str = "aaaa0001",
    scenario: str = "sco-hybrid",
    version: str = "",
) -> tuple[date, Run]:
    """Return a quiet run with these arms measured, in tokens a second."""
    when, made = row(night, 0, host=host, scenario=scenario, version=version or None)
    arms = tuple(
        with_speed(arm(0, 1, name, Expected.LIVES), speed) for name, speed in speeds.items()
    )
    return when, replace(made, arms=arms)
