"""The example runs in `reports/examples`: real journals, and their reports as golden files.

`UPDATE_GOLDEN=1 pytest tests/core/report` renders them again. Logs are not kept, nor are the runs
of maps and searches: nothing links to them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from vllm_repro.journal.journal import read
from vllm_repro.report.build import report_of
from vllm_repro.report.json_report import RunJson
from vllm_repro.report.model import RunReport, arm_fields, verdict_fields
from vllm_repro.scenario.catalogue import find
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected, arm_result, decide

T = TypeVar("T")

_FOLDER = Path(__file__).parents[1] / "reports" / "examples"
EXAMPLES = sorted(path.parent for path in _FOLDER.glob("*/journal.jsonl"))
MAPS = sorted(path.parent for path in _FOLDER.glob("versions/**/versions.json"))
"""Maps, each with one folder for each release that was added later."""
REHEARSAL = _FOLDER / "tq-chunked-prefill-rehearsal"
DIED, LIVED = (_FOLDER / f"tq-chunked-prefill-lab-{version}" for version in ("0.23.0", "0.24.0"))
WRONG = _FOLDER / "tq-mtp-wrong-tokens-lab-0.24.0"
"""The bug in the last release before its fix and in the first one after it; and wrong answers."""
VERSIONS = (
    "0.20.2",
    "0.21.0",
    "0.22.1",
    "0.23.0",
    "0.24.0",
    "0.25.1",
    "0.26.0",
    "0.27.0",
    "0.28.0",
)
"""Releases of `run_of`."""


@cache
def report(folder: Path) -> RunReport:
    return report_of(read(folder / "journal.jsonl"), Path("reports") / "examples" / folder.name)


def replace(record: T, **changes: Any) -> T:
    """Like `dataclasses.replace`, also for the records of a report."""
    change = structs.replace if isinstance(record, Struct) else dataclasses.replace
    changed: T = change(record, **changes)  # type: ignore[type-var]  # a dataclass then
    return changed


def without_run_links(text: str) -> str:
    """Return the Markdown of a search as it is kept: its runs are named, not linked."""
    return re.sub(r"\[([^\]]+)\]\(\.\./[^)]*\)", r"\1", text)


def run_of(version: str, outcomes: Sequence[Outcome], *, reported: str | None = None) -> RunReport:
    """Return the example run on this release, with these trials in its first arm."""
    made = report(REHEARSAL)
    first = made.arms[0]
    dead = first.trials[0]
    trials = tuple(
        replace(
            dead,
            number=number,
            outcome=outcome,
            version=(
                None if outcome in (Outcome.INFRA, Outcome.UNSUPPORTED) else reported or version
            ),
            boot_s=(
                None
                if outcome in (Outcome.INFRA, Outcome.UNSUPPORTED, Outcome.BOOT_FAILED)
                else 10.0 * number
            ),
            trigger=replace(dead.trigger, crossed=outcome in (Outcome.CRASH, Outcome.CLEAN)),
            death=dead.death if outcome is Outcome.CRASH else None,
            why=f"it was {outcome}",
        )
        for number, outcome in enumerate(outcomes, 1)
    )
    result = arm_result(first.name, Expected.DIES, outcomes)
    verdict = decide([result], standing=find(made.scenario).status.standing(version))
    folder = Path(f"20260101T00000{VERSIONS.index(version)}Z-abcdef")
    arm = replace(first, trials=trials, **arm_fields(result))
    return replace(
        made, folder=folder, arms=(arm,), vllm_version=version, **verdict_fields(verdict)
    )


def check_files(folder: Path) -> None:
    """Raise `msgspec.ValidationError` for a `report.json` below `folder` that breaks its schema."""
    for path in folder.rglob("report.json"):
        msgspec.json.decode(path.read_bytes(), type=RunJson)
