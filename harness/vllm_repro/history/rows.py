"""One run as the history stores it: a `RunRow` with its arms and their figures, taken from the run's report."""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import asdict, dataclass
from enum import StrEnum

from packaging.version import InvalidVersion, Version

from vllm_repro.evidence import Evidence
from vllm_repro.host.host_id import hardware
from vllm_repro.report.model import ArmReport, RunReport, ServerReport
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.throughput import Point
from vllm_repro.verdict.verdict import Expected, Result, Standing, Verdict, from_source

__all__ = ["QUANTITIES", "ArmRow", "Build", "Figure", "RunRow", "build_of", "row_id", "row_of", "setup_of"]


QUANTITIES = ("output_tok_s", "ttft_s", "tpot_s")
"""Figures that are stored, by their names in `verdict.throughput.Figures`."""


class Build(StrEnum):
    """Kind of vLLM build."""

    NIGHTLY = "nightly"  # any build between releases, release candidates too
    RELEASE = "release"
    SOURCE = "source"  # a commit or a folder
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Median and quartiles of one quantity of an arm at one load, over n rounds.

    quantity: one of `QUANTITIES`, in tokens a second or seconds.
    """

    point: Point
    quantity: str
    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, kw_only=True)
class ArmRow:
    """One arm: `crashed` of `boots` conclusive ones showed the bug.

    patched: an overlay changed vLLM's source. signature: exception and its match with the scenario, empty if the arm lived.
    setup: hash of flags and model; figures of different setups are not compared. figures: empty if none was measured or may be claimed.
    """

    name: str
    expected: Expected
    result: Result
    crashed: int
    boots: int
    patched: bool = False
    signature: str = ""
    setup: str = ""
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run. `id` is its folder, relative to that of all reports. started_at: UTC, `2026-11-22T03:45:16Z`.

    expected: as declared (True), a surprise (False), undecided (None). interrupted: the signal that ended it. cut: the journal has no end.
    standing: what the scenario declares for this release.
    """

    id: str
    scenario: str
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
        """Return the arms that should show the bug, in unpatched vLLM."""
        return tuple(arm for arm in self.arms if arm.expected.has_bug and not arm.patched)

    @property
    def died(self) -> ArmRow | None:
        """Return the first leading arm that showed the bug."""
        return next((arm for arm in self.leading if arm.crashed), None)

    @property
    def quiet(self) -> int:
        """Return the boots in which every leading arm crossed the trigger and lived; 0 if one of them did not."""
        if not self.leading or any(arm.result is not Result.QUIET for arm in self.leading):
            return 0
        return min(arm.boots for arm in self.leading)


def build_of(version: str | None) -> Build:
    """Return the kind of build: `0.23.1rc1.dev123+gabc` is a nightly, `0.23.0+cu130` and `0.23.0.post1` are releases."""
    try:
        parsed = Version(version or "")
    except InvalidVersion:
        return Build.UNKNOWN
    if from_source(version):
        return Build.SOURCE
    return Build.NIGHTLY if parsed.is_prerelease else Build.RELEASE


def row_id(report: RunReport) -> str:
    """Return the id of a run's row."""
    return f"{report.scenario}/{report.folder.name}"


def row_of(report: RunReport) -> RunRow:
    """Return the row of a run. Only figures of GPUs are kept."""
    return RunRow(
        id=row_id(report),
        scenario=report.scenario,
        started_at=report.started_at,
        host=report.host,
        hardware=hardware(asdict(report.environment)),
        evidence=report.evidence,
        server=next((arm.server.kind for arm in report.arms if arm.server.kind), ""),
        version=report.version,
        build=build_of(report.version),
        standing=report.standing,
        verdict=report.verdict.verdict,
        expected=report.verdict.expected,
        because=report.verdict.because,
        interrupted=report.interrupted,
        cut=report.cut,
        infra=bool(report.infra),
        arms=tuple(_arm(report, arm) for arm in report.arms),
    )


def _arm(report: RunReport, arm: ArmReport) -> ArmRow:
    quiet = arm.result.result is Result.QUIET
    return ArmRow(
        name=arm.name,
        expected=arm.expected,
        # A rehearsal that does not have the bug lives whatever vLLM does.
        result=Result.INCONCLUSIVE if quiet and not report.imitated else arm.result.result,
        crashed=arm.result.crashed,
        boots=arm.result.conclusive,
        patched=bool(arm.patches or arm.server.patched),
        signature=_signature(arm),
        setup=setup_of(arm.command, arm.server),
        figures=_figures(report, arm.name),
    )


def _signature(arm: ArmReport) -> str:
    """Return `match: AssertionError in _continuation_prefill` for the first death outside a cancelled trial."""
    death = next((one.death for one in arm.trials if one.death and one.outcome is not Outcome.CANCELLED), None)
    if death is None:
        return ""
    where = f" in {death.frames[-1].rpartition(':')[2]}" if death.frames else ""
    return f"{death.signature or 'unknown'}: {death.exception or 'no exception'}{where}"


def _figures(report: RunReport, arm: str) -> tuple[Figure, ...]:
    if report.measured is None or report.measured.withheld or report.evidence != Evidence.GPU:
        return ()
    return tuple(
        Figure(
            point=one.figures.point, quantity=name, median=spread.median, low=spread.low, high=spread.high, n=spread.n
        )
        for one in report.measured.speeds
        if one.arm == arm
        for name in QUANTITIES
        if (spread := getattr(one.figures, name)) is not None
    )


_OF_THIS_RUN = ("-p", "--publish", "--port", "--host", "--name", "--label", "--network", "--mount", "-v", "--volume")


def setup_of(command: str, server: ServerReport) -> str:
    """Return a hash of an arm's command without the ports, paths, names and image of this run."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    kept: list[str] = []
    skip = False
    for word in words:
        if skip or word.partition("=")[0] in _OF_THIS_RUN:
            skip = not skip and "=" not in word
        elif word != server.image:
            kept.append(re.sub(r"(^|=)[~.$]?\w*/.*/", r"\1", word))  # keep only the last name of a path
    text = "\n".join([str(server.kind), *kept])
    return hashlib.blake2s(text.encode(), digest_size=4).hexdigest()
