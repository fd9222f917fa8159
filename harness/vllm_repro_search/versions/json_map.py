"""`versions.json`: its record, which is the contract, and how it is made from a map.

`python -m vllm_repro_search.versions.json_map` prints its JSON Schema. Times are in seconds. Later versions may add keys.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec
from msgspec import Struct

from vllm_repro.conversion import convert
from vllm_repro.report.json_report import plain
from vllm_repro.report.model import arm_fields
from vllm_repro.scenario.scenario import Status
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected, Result, Standing, Verdict
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_search.versions.release_result import ReleaseResult
from vllm_repro_search.versions.version_map import ReleaseArm, ReleaseRow, VersionMap, readings

__all__ = ["ReleaseArmJson", "VersionMapJson", "version_map_dict"]


class CrossedJson(Struct, frozen=True, kw_only=True):
    """Result of the trigger, without its evidence."""

    crossed: bool


class SignatureJson(Struct, frozen=True, kw_only=True):
    """How a death compares with the scenario's signature; None if no cause is known."""

    signature: str | None


class ReleaseTrialJson(Struct, frozen=True, kw_only=True):
    """One trial of a version map. The run's `report.json` has all of it."""

    outcome: Outcome
    trigger: CrossedJson
    death: SignatureJson | None
    boot_s: float | None


class ReleaseArmJson(Struct, frozen=True, kw_only=True):
    """One arm in one release."""

    name: str
    expected: Expected
    declared: Standing
    fate: ReleaseResult
    result: Result
    k: int
    n: int
    bound: str
    trials: tuple[ReleaseTrialJson, ...]


class ReleaseJson(Struct, frozen=True, kw_only=True):
    """One release.

    version: as asked for. vllm_version: as the server reported. run: the name of the run's folder, beside the folder `versions`.
    compiled: the release of its compiled parts, if they are not its own.
    """

    version: str
    vllm_version: str | None
    declared: Standing
    arms: tuple[ReleaseArmJson, ...]
    verdict: Verdict | None
    expected: bool
    undecided: bool
    why: str
    run: str | None
    compiled: str | None = None


class VersionMapJson(Struct, frozen=True, kw_only=True):
    """`versions.json`, schema 1.

    evidence: None if no server ever started. trials: boots per arm and release. versions: all that were asked for. pending: those without
    a row. reading: one sentence per arm. expected: every release has a row, and every row is as declared.
    """

    schema: Literal[1] = 1
    scenario: str
    issue: str
    title: str
    status: Status
    server: str
    evidence: str | None
    rehearsal: bool
    arms: tuple[str, ...]
    trials: int
    versions: tuple[str, ...]
    pending: tuple[str, ...]
    reading: str
    expected: bool
    undecided: bool
    rows: tuple[ReleaseJson, ...]
    harness_version: str
    started_at: str
    duration_s: float
    interrupted: str | None
    reproduce: str


def version_map_dict(version_map: VersionMap) -> dict[str, Any]:
    """Return the content of `versions.json` as plain dicts and lists."""
    known = {
        **vars(version_map),
        "rehearsal": version_map.evidence == Evidence.REHEARSAL,
        "pending": version_map.pending,
        "reading": ". ".join(readings(version_map)),
        "expected": version_map.expected is True,
        "undecided": version_map.expected is None,
        "rows": tuple(map(_row, version_map.rows)),
    }
    return plain(convert(known, VersionMapJson))


def _row(row: ReleaseRow) -> dict[str, Any]:
    return {
        **vars(row),
        "vllm_version": row.reported,
        "arms": tuple(map(_arm, row.arms)),
        "expected": row.expected is True,
        "undecided": row.expected is None,
    }


def _arm(arm: ReleaseArm) -> dict[str, Any]:
    trials = convert(arm.trials, tuple[ReleaseTrialJson, ...], from_attributes=True)
    return {**arm_fields(arm.result), "declared": arm.declared, "fate": arm.fate, "trials": trials}


if __name__ == "__main__":
    print(json.dumps(msgspec.json.schema(VersionMapJson), indent=2))
