"""The example runs in `reports/examples`: real journals, and what they render to. They are the golden files of the reports.

`UPDATE_GOLDEN=1 pytest tests/report` renders them anew. `reports/examples/versions` holds version maps of runs that are not kept.
"""

from __future__ import annotations

from pathlib import Path

from vllm_repro.journal.journal import read
from vllm_repro.report.build import report_of
from vllm_repro.report.model import RunReport

_FOLDER = Path(__file__).parents[1] / "reports" / "examples"
EXAMPLES = sorted(path.parent for path in _FOLDER.glob("*/journal.jsonl"))
MAPS = sorted(path.parent for path in _FOLDER.glob("versions/*/versions.json"))
REHEARSAL = _FOLDER / "tq-chunked-prefill-rehearsal"
DIED, LIVED = (_FOLDER / f"tq-chunked-prefill-lab-{version}" for version in ("0.23.0", "0.24.0"))
WRONG = _FOLDER / "tq-mtp-wrong-tokens-lab-0.24.0"
"""Of the reported bug, on the releases on both sides of its fix; and answers that differ from the baseline's."""


def report(folder: Path) -> RunReport:
    return report_of(read(folder / "journal.jsonl"), Path("reports") / "examples" / folder.name)
