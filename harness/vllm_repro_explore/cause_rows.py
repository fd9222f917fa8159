"""Table of named source changes: how often each one died, on EngineCore alone or on a server.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from vllm_repro.report.format import columns
from vllm_repro.report.model import RunReport
from vllm_repro.scenario.scenario import Cause, Causes
from vllm_repro.verdict.statistics import excluded_rate, fisher
from vllm_repro.verdict.verdict import Expected
from vllm_repro_explore.case import Case, Request, Setup
from vllm_repro_explore.finding import FindingKind, PlayResult

__all__ = ["CauseRow", "booted", "case_of", "lines", "reading", "tried"]

_LISTED = "store-listed-twice"
_SURE = 0.01
_FEW = 5
"""With fewer trials than this, Fisher's test cannot reach `_SURE`: only all-or-none is read."""
_SURPRISE = {True: "", False: "  A SURPRISE", None: "  UNDECIDED"}


@dataclass(frozen=True, kw_only=True)
class CauseRow:
    """Result of one change."""

    cause: Cause
    trials: int
    # trials that crashed
    died: int
    # trials in which a transfer listed a block twice; None on servers, which do not log it
    listed: int | None = None
    # where they crashed
    sites: tuple[str, ...] = ()
    # folder name of the run on servers
    run: str | None = None

    @property
    def as_expected(self) -> bool | None:
        """Return None if no trial was conclusive."""
        return (self.died > 0) == (self.cause.expected is Expected.DIES) if self.trials else None

    def as_json(self) -> dict[str, Any]:
        cause = self.cause
        return {
            "change": cause.name,
            "release": cause.release,
            "arm": cause.arm,
            "files": sorted({patch.file for patch in cause.patches}),
            "expected": cause.expected.value,
            "n": self.trials,
            "died": self.died,
            "listed_twice": self.listed,
            "sites": list(self.sites),
            "as_expected": self.as_expected,
            "run": self.run,
        }


def case_of(causes: Causes, setup: Setup, seed: int) -> Case:
    """Return the workload of a seed; it is the same for every change."""
    assert causes.prompts is not None, "a server has the workload of its arm"
    rng = Random(seed)
    blocks, over = causes.prompts.between
    length = rng.randint(*blocks) * setup.block + rng.randint(*over)
    return Case.numbered(setup, [[Request(length, causes.answer)]] * causes.requests, seed)


def tried(cause: Cause, cases: Sequence[Case], play: Callable[[Case], PlayResult]) -> CauseRow:
    """Play the cases with one change. Raise ValueError if vLLM refuses to start with a case."""
    died = listed = 0
    sites: dict[str, None] = {}
    for case in cases:
        outcome = play(case)
        if outcome.invalid:
            raise ValueError(outcome.invalid)
        deaths = [finding for finding in outcome.findings if finding.kind is FindingKind.DEATH]
        died += bool(deaths)
        listed += any(finding.site == _LISTED for finding in outcome.findings)
        sites |= dict.fromkeys(finding.site for finding in deaths)
    return CauseRow(cause=cause, trials=len(cases), died=died, listed=listed, sites=tuple(sites))


def booted(cause: Cause, report: RunReport) -> CauseRow:
    """Return the row of a run with one arm. Inconclusive trials do not count."""
    (arm,) = report.arms
    sites = dict.fromkeys(
        trial.death.exception for trial in arm.trials if trial.death and trial.death.exception
    )
    run = report.folder.name
    return CauseRow(cause=cause, trials=arm.n, died=arm.k, sites=tuple(sites), run=run)


def reading(row: CauseRow, released: CauseRow) -> str:
    """Return in words what a change does to its release.

    By Fisher's exact test against the unchanged release.
    """
    if row.cause == released.cause:
        return "as released"
    if not row.trials or not released.trials:
        return "unknown: no conclusive trial with it, or without it"
    more, fewer = (row, released) if row.died >= released.died else (released, row)
    clear = fisher(more.died, more.trials, fewer.died, fewer.trials) <= _SURE
    if min(row.trials, released.trials) < _FEW and more.died:
        if more.died < more.trials or 0 < fewer.died < fewer.trials:
            return "too few trials to tell"
        clear = clear or not fewer.died
    if not clear:
        believed = row.cause.believed
        return (
            f"does not protect, though {believed}" if believed else "changes nothing that was seen"
        )
    if row.died > released.died:
        return "brings the crash back"
    return "protects in part" if row.died else "protects"


def lines(rows: Sequence[CauseRow], released: dict[tuple[str, str], CauseRow]) -> list[str]:
    """Return the table as text lines, one row per change."""
    servers = any(row.listed is None for row in rows)  # they do not log which blocks are listed
    limits = [8, 16, 64, 12, 10, 80]
    table = [["release", "server", "change", "die", "list twice", "reading"]]
    for row in rows:
        read = reading(row, released[row.cause.release, row.cause.arm]) + _SURPRISE[row.as_expected]
        died = f"{row.died} of {row.trials}"
        table.append(
            [row.cause.release, row.cause.arm, row.cause.name, died, f"{row.listed}", read]
        )
    if servers:
        del limits[4]
        for line in table:
            del line[4]
    text = [*columns([tuple(line) for line in table], limits), ""]
    if quiet := min((row.trials for row in rows if row.trials and not row.died), default=0):
        unit = "boots" if servers else "such workloads"
        text.append(
            f"0 crashes in {quiet} {unit}: the true rate is below {excluded_rate(quiet):.0%} (95 %"
            " confidence)"
        )
    return text
