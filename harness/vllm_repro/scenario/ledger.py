"""Ledger of known bugs: `reports/results/catalogue.json`, written by `make catalogue`.

It has what was seen of each bug in each release, in kept runs and version maps, and the state of
its issue when it was last read. `msgspec.json.schema(Ledger)` is its JSON Schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import msgspec

from vllm_repro.conversion import decode
from vllm_repro.resources import ledger_file
from vllm_repro_diagnosis.evidence import Evidence


class Sighted(msgspec.Struct, frozen=True, kw_only=True):
    """What the reported command did in one release."""

    release: str
    # `dies`, `dies-sometimes`, `lives` or another result of a version map
    outcome: str
    evidence: Evidence
    # crashes, and boots that decide
    k: int
    n: int
    started_at: str
    # the kept run or map, from `reports/`
    run: str


class Workaround(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the command with which the engine lives."""

    arm: str
    change: str
    # measured costs, a sentence each
    prices: tuple[str, ...]


class Fix(msgspec.Struct, frozen=True, kw_only=True):
    """The declared fix."""

    # first release without the bug; None if there is none
    release: str | None
    # pull requests and their states when the issue was read
    note: str


class Bug(msgspec.Struct, frozen=True, kw_only=True):
    """A bug, by the id of its scenario."""

    id: str
    title: str
    # address of the issue, or of the nearest if nobody has reported the bug
    issue: str
    filed: bool
    # of the issue, when it was last read
    state: str
    # day or month of that; empty if it was not read
    checked: str
    subsystem: str
    # declared releases with the bug, as pip specifiers
    bad: str
    releases: tuple[Sighted, ...]
    fix: Fix
    workarounds: tuple[Workaround, ...]


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """The ledger. `schema` changes if a key changes its meaning or is removed."""

    schema: int
    # newest release of vLLM when it was written
    newest: str
    bugs: tuple[Bug, ...]


@cache
def ledger() -> dict[str, Bug]:
    """Return the bugs of the package by id."""
    return {bug.id: bug for bug in decode(ledger_file().read_bytes(), Ledger).bugs}


def ledger_values(scenario: str) -> dict[str, object]:
    """Return issue state and releases of a scenario for JSON; those of an unknown one are empty."""
    bug = ledger().get(scenario)
    releases = bug.releases if bug else ()
    state = bug.state if bug else "unknown"
    return {"state": state, "releases": [msgspec.to_builtins(seen) for seen in releases]}


def strongest(seen: Sequence[Sighted]) -> str:
    """Return the strongest evidence that shows the bug: `GPU`; `-` if none does."""
    shown = [each.evidence for each in seen if each.outcome.startswith("dies")]
    return min(shown, key=list(Evidence).index).upper() if shown else "-"
