"""Each change of a release tried on its scheduler alone, and what the row says. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from vllm_repro.cause import Cause, Causes
from vllm_repro.explorer.case import Ask, Case, Setup
from vllm_repro.explorer.finding import Kind, Outcome
from vllm_repro.report.wording import columns
from vllm_repro.statistics import excluded_rate, fisher
from vllm_repro.verdict import Expected

__all__ = ["Row", "case_of", "lines", "reading", "tried"]

_LISTED = "store-listed-twice"
_SURE = 0.01


@dataclass(frozen=True)
class Row:
    """died, listed: of `trials`, those that ended in a death and those in which a transfer listed a block twice. sites: of the deaths."""

    cause: Cause
    trials: int
    died: int
    listed: int
    sites: tuple[str, ...] = ()

    @property
    def as_expected(self) -> bool:
        return (self.died > 0) == (self.cause.expected is Expected.DIES)

    def as_json(self) -> dict[str, Any]:
        cause = asdict(self.cause) | {"expected": self.cause.expected.value}
        files = sorted({patch.file for patch in self.cause.patches})
        return {
            "change": cause["name"],
            "release": cause["release"],
            "arm": cause["arm"],
            "files": files,
            "expected": cause["expected"],
            "n": self.trials,
            "died": self.died,
            "listed_twice": self.listed,
            "sites": list(self.sites),
            "as_expected": self.as_expected,
        }


def case_of(causes: Causes, setup: Setup, seed: int) -> Case:
    """The workload of a seed, the same for every change."""
    rng = Random(seed)
    blocks, over = causes.prompts.between
    length = rng.randint(*blocks) * setup.block + rng.randint(*over)
    return Case(setup, ((Ask(length, causes.answer),),) * causes.requests, seed)


def tried(cause: Cause, cases: Sequence[Case], play: Callable[[Case], Outcome]) -> Row:
    """Raises ValueError where a server would not start with a case: then nothing was tried."""
    died = listed = 0
    sites: dict[str, None] = {}
    for case in cases:
        outcome = play(case)
        if outcome.invalid:
            raise ValueError(outcome.invalid)
        deaths = [finding for finding in outcome.findings if finding.kind is Kind.DEATH]
        died += bool(deaths)
        listed += any(finding.site == _LISTED for finding in outcome.findings)
        sites |= dict.fromkeys(finding.site for finding in deaths)
    return Row(cause, len(cases), died, listed, tuple(sites))


def reading(row: Row, released: Row) -> str:
    """What a change does to the release that it is made in, with the chance that it is nothing said before."""
    if row.cause == released.cause:
        return "as released"
    more, fewer = (row, released) if row.died >= released.died else (released, row)
    if fisher(more.died, more.trials, fewer.died, fewer.trials) > _SURE:
        return (
            f"does not protect, though {row.cause.believed}" if row.cause.believed else "changes nothing that was seen"
        )
    if row.died > released.died:
        return "brings the death back"
    return "protects" if not row.died else "protects in part"


def lines(rows: Sequence[Row], released: dict[tuple[str, str], Row]) -> list[str]:
    """The table: a row a change, each beside its release as released."""
    head = ("release", "server", "change", "die", "list twice", "reading")
    body = [
        (
            row.cause.release,
            row.cause.arm,
            row.cause.name,
            f"{row.died} of {row.trials}",
            f"{row.listed}",
            reading(row, released[row.cause.release, row.cause.arm]) + ("" if row.as_expected else "  A SURPRISE"),
        )
        for row in rows
    ]
    quiet = min((row.trials for row in rows if not row.died), default=0)
    bound = (
        [f"none of {quiet} excludes a death in more than {excluded_rate(quiet):.0%} of such workloads"] if quiet else []
    )
    return [*columns([head, *body], (8, 16, 64, 12, 10, 80)), "", *bound]
