"""One run as the history keeps it: a `RunRow` with its arms and their figures. Pure.

A row says what the run's report says, and no more; what rows mean beside each other is for `life` and `trend`.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from packaging.version import InvalidVersion, Version

from vllm_repro.host.host_id import hardware
from vllm_repro.report.model import ArmReport, RunReport
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.throughput import Figures, Point, Spread
from vllm_repro.verdict.verdict import Expected, Result, Standing, Verdict

__all__ = ["ArmRow", "Build", "Figure", "RunRow", "build_of", "row_id", "row_of", "setup_of"]


class Build(StrEnum):
    """What kind of vLLM ran."""

    NIGHTLY = "nightly"  # any build between releases, release candidates too
    RELEASE = "release"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Figure:
    """One quantity of an arm at a point, over n rounds of so many boots: the median and the quartiles about it.

    quantity: `output_tok_s` (tokens a second), `ttft_s` or `tpot_s` (seconds).
    """

    point: Point
    quantity: str
    median: float
    low: float
    high: float
    n: int
    boots: int


@dataclass(frozen=True)
class ArmRow:
    """One arm: `crashed` of `boots` conclusive ones showed the bug.

    patched: whether a change of vLLM's source was laid over the release. signature: what it died of, and how that compares with the
    scenario's; empty where it lived. setup: eight hex digits of the flags and the model, since figures of different ones are not compared.
    figures: None where none was measured or may be claimed.
    """

    name: str
    expected: Expected
    result: Result
    crashed: int
    boots: int
    patched: bool = False
    signature: str = ""
    setup: str = ""
    figures: tuple[Figure, ...] | None = None


@dataclass(frozen=True)
class RunRow:
    """A run. `id` is its folder, relative to that of all reports. started_at: UTC, `2026-11-22T03:45:16Z`.

    expected: as declared (True), a surprise (False), undecided (None). interrupted: the signal that ended it. cut: its journal ends
    before the run did. standing: what the scenario declares for this release. last: outcomes that are neither death nor life, by name.
    """

    id: str
    scenario: str
    issue: str
    started_at: str
    host: str
    hardware: str
    evidence: str
    server: str
    version: str | None
    build: Build
    standing: Standing
    verdict: Verdict
    expected: bool | None
    because: str
    interrupted: str | None
    cut: bool
    infra: bool
    arms: tuple[ArmRow, ...]

    @property
    def leading(self) -> tuple[ArmRow, ...]:
        """The arms that show the bug where it is, in vLLM as it was built."""
        return tuple(arm for arm in self.arms if arm.expected.has_bug and not arm.patched)

    @property
    def died(self) -> ArmRow | None:
        """The first of them that showed it."""
        return next((arm for arm in self.leading if arm.crashed), None)

    @property
    def quiet(self) -> int:
        """Boots in which each of them crossed the trigger and lived; 0 where that cannot be said of all."""
        if not self.leading or any(arm.result is not Result.QUIET for arm in self.leading):
            return 0
        return min(arm.boots for arm in self.leading)


def build_of(version: str | None) -> Build:
    """`0.23.1rc1.dev123+gabc` is a nightly, `0.23.0+cu130` and `0.23.0.post1` are releases."""
    try:
        parsed = Version(version or "")
    except InvalidVersion:
        return Build.UNKNOWN
    return Build.NIGHTLY if parsed.is_prerelease else Build.RELEASE


def row_id(report: RunReport) -> str:
    return f"{report.scenario}/{report.folder.name}"


def row_of(report: RunReport) -> RunRow:
    """The row of a run. A figure is kept only where it is a claim about a GPU."""
    return RunRow(
        row_id(report),
        report.scenario,
        report.issue,
        report.started_at,
        report.host,
        hardware(report.environment),
        report.evidence,
        next((str(arm.server["kind"]) for arm in report.arms if arm.server.get("kind")), ""),
        report.version,
        build_of(report.version),
        report.standing,
        report.verdict.verdict,
        report.verdict.expected,
        report.verdict.because,
        report.interrupted,
        report.cut,
        bool(report.infra),
        tuple(_arm(report, arm) for arm in report.arms),
    )


def _arm(report: RunReport, arm: ArmReport) -> ArmRow:
    quiet = arm.result.result is Result.QUIET
    return ArmRow(
        arm.name,
        arm.expected,
        # Where a rehearsal does not have the bug, its engine's life says nothing.
        Result.INCONCLUSIVE if quiet and not report.imitated else arm.result.result,
        arm.result.crashed,
        arm.result.conclusive,
        bool(arm.patches or arm.server.get("patched")),
        _signature(arm),
        setup_of(arm.command, arm.server),
        _figures(report, arm.name),
    )


def _signature(arm: ArmReport) -> str:
    """`match: AssertionError in _continuation_prefill`, of the first death that was not cut."""
    death = next((one.death for one in arm.trials if one.death and one.outcome is not Outcome.CANCELLED), None)
    if death is None:
        return ""
    where = f" in {death.frames[-1].rpartition(':')[2]}" if death.frames else ""
    return f"{death.signature or 'unknown'}: {death.exception or 'no exception'}{where}"


def _figures(report: RunReport, arm: str) -> tuple[Figure, ...] | None:
    if report.measured is None or report.measured.withheld or report.evidence != "gpu":
        return None
    found = [figure for row in report.measured.rows if row.arm == arm for figure in _of_point(row.figures)]
    return tuple(found) or None


def _of_point(one: Figures) -> list[Figure]:
    spreads: Mapping[str, Spread | None] = {
        "output_tok_s": one.output_tok_s,
        "ttft_s": one.ttft_s,
        "tpot_s": one.tpot_s,
    }
    return [
        Figure(one.point, name, spread.median, spread.low, spread.high, spread.n, one.boots)
        for name, spread in spreads.items()
        if spread is not None
    ]


_OF_THIS_RUN = ("-p", "--publish", "--port", "--host", "--name", "--label", "--network", "--mount", "-v", "--volume")


def setup_of(command: str, server: Mapping[str, Any]) -> str:
    """Eight hex digits of what an arm serves and how: its command without the ports, paths, names and image of this very run."""
    kept: list[str] = []
    skip = False
    for word in _words(command):
        name = word.partition("=")[0]
        if skip or name in _OF_THIS_RUN:
            skip = not skip and "=" not in word
        elif word != server.get("image"):
            kept.append(re.sub(r"(^|=)[~.$]?\w*/.*/", r"\1", word))  # of a path its last name
    told = "\n".join([str(server.get("kind")), *kept])
    return hashlib.blake2s(told.encode(), digest_size=4).hexdigest()


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError:
        return command.split()
