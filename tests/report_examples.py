"""The example runs in `reports/examples`: real journals, and their reports as golden files.

`UPDATE_GOLDEN=1 pytest tests/report` renders them again. Logs are not kept, nor are the runs of maps and searches: nothing links to them.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, structs

from vllm_repro.journal.journal import read
from vllm_repro.report.build import report_of
from vllm_repro.report.json_report import RunJson
from vllm_repro.report.model import RunReport
from vllm_repro_search.versions.json_map import VersionMapJson

T = TypeVar("T")

_FOLDER = Path(__file__).parents[1] / "reports" / "examples"
EXAMPLES = sorted(path.parent for path in _FOLDER.glob("*/journal.jsonl"))
MAPS = sorted(path.parent for path in _FOLDER.glob("versions/**/versions.json"))
"""Maps, each with one folder for each release that was added later."""
REHEARSAL = _FOLDER / "tq-chunked-prefill-rehearsal"
DIED, LIVED = (_FOLDER / f"tq-chunked-prefill-lab-{version}" for version in ("0.23.0", "0.24.0"))
WRONG = _FOLDER / "tq-mtp-wrong-tokens-lab-0.24.0"
"""The bug in the last release before its fix and in the first one after it; and wrong answers."""


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


def check_files(folder: Path) -> None:
    """Raise `msgspec.ValidationError` for a `report.json` or `versions.json` below `folder` that breaks its schema."""
    for name, record in (("report.json", RunJson), ("versions.json", VersionMapJson)):
        for path in folder.rglob(name):
            msgspec.json.decode(path.read_bytes(), type=record)
