"""Rows for tests: one run of one arm by default."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

from vllm_repro.history.rows import ArmRow, Figure, RunRow, build_of
from vllm_repro.verdict.throughput import Point
from vllm_repro.verdict.verdict import Expected, Result, Standing, Verdict

FIRST = date(2026, 9, 1)
POINT = Point(128, 512, 4)
NIGHTLY, RELEASE = "0.24.1rc1.dev{0}+gabc", "0.24.{0}"


def arm(crashed: int, boots: int, name: str = "reported", expected: Expected = Expected.DIES) -> ArmRow:
    if not boots:
        result = Result.INCONCLUSIVE
    elif not crashed:
        result = Result.QUIET
    else:
        result = Result.REPRODUCES if crashed == boots else Result.FLAKY
    return ArmRow(name=name, expected=expected, result=result, crashed=crashed, boots=boots)


def figure(speed: float) -> Figure:
    return Figure(point=POINT, quantity="output_tok_s", median=speed, low=0.99 * speed, high=1.01 * speed, n=10)


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
) -> tuple[date, RunRow]:
    """Return a run of a night counted from 0, whose arm died in `crashed` of `boots`. The default version is that night's nightly."""
    version = version or NIGHTLY.format(night)
    started = datetime(FIRST.year, FIRST.month, FIRST.day, hour, tzinfo=UTC) + timedelta(days=night)
    verdict = Verdict.INCONCLUSIVE if not boots else Verdict.REPRODUCES if crashed else Verdict.QUIET
    if crashed and standing is Standing.GOOD:
        verdict = Verdict.REGRESSED
    made = RunRow(
        id=f"{scenario}/{started:%Y%m%dT%H%M%SZ}-{host[:6]}",
        scenario=scenario,
        started_at=f"{started:%Y-%m-%dT%H:%M:%SZ}",
        host=host,
        hardware="1 x NVIDIA H200",
        evidence=evidence,
        server="docker",
        version=version,
        build=build_of(version),
        standing=standing,
        verdict=verdict,
        expected=None if not boots else True,
        because="because",
        interrupted=None,
        cut=False,
        infra=False,
        arms=(arm(crashed, boots),),
    )
    return FIRST + timedelta(days=night), made


def measured(
    night: int, speeds: dict[str, float], *, host: str = "aaaa0001", scenario: str = "sco-hybrid", version: str = ""
) -> tuple[date, RunRow]:
    """Return a quiet run with these arms measured, in tokens a second."""
    when, made = row(night, 0, host=host, scenario=scenario, version=version or None)
    arms = tuple(
        replace(arm(0, 1, name, Expected.LIVES), setup="0", figures=(figure(speed),)) for name, speed in speeds.items()
    )
    return when, replace(made, arms=arms)
