"""Ledger of known bugs: `reports/results/catalogue.json`, which `make catalogue` writes.

For each bug it has the result of each release, from kept runs and version maps, and the state of
its issue when that was last read. `schema` is 1: keys are added, never changed.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from vllm_repro.resources import ledger_file
from vllm_repro_diagnosis.evidence import Evidence


@cache
def _bugs() -> dict[str, dict[str, Any]]:
    """Return the ledger's record of each known bug, by scenario id."""
    return {bug["id"]: bug for bug in json.loads(ledger_file().read_bytes())["bugs"]}


def ledger_values(scenario: str) -> dict[str, Any]:
    """Return the state of a bug's issue, and what was seen in each release.

    The keys are `state`, such as "open", and `releases`, a list of records with the keys `release`,
    `evidence`, `outcome` and others. For a bug that is not in the ledger the state is "unknown" and
    the list is empty. scenario: an id.
    """
    bug = _bugs().get(scenario, {"state": "unknown", "releases": []})
    return {key: bug[key] for key in ("state", "releases")}


def strongest_evidence(scenario: str) -> str:
    """Return the strongest evidence in the ledger that shows a bug, such as `GPU`, or `-`.

    scenario: an id.
    """
    seen = ledger_values(scenario)["releases"]
    shown = {Evidence(each["evidence"]) for each in seen if each["outcome"].startswith("dies")}
    return next((evidence.upper() for evidence in Evidence if evidence in shown), "-")
