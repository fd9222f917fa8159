"""A reviewed table of diagnoses: each sign of death after each part of a boot.

A row of `tests/golden/diagnoses.txt` names the lines of a log (`tests/data/log_lines.txt`) and
what the caller knows; the line below it is their diagnosis.
"""

from __future__ import annotations

import re

from tests.diagnosis.logs import DATA, inner
from tests.golden_files import TESTS, assert_golden
from vllm_repro_diagnosis.diagnosis import diagnose

_, *PARTS = re.split(
    r"^== (\S+)\n", (DATA / "log_lines.txt").read_text("utf-8"), flags=re.MULTILINE
)
LINES = dict(zip(PARTS[::2], PARTS[1::2], strict=True))
TOLD = {" (we terminated: True)": True, " (we terminated: False)": False, "": None}
DIED = {True: "died", False: "lives", None: "undecided"}


def diagnosed(row: str) -> str:
    """Return the diagnosis of a row's log."""
    told = next(words for words in TOLD if row.endswith(words))
    log = "".join(LINES[name] for name in row.removesuffix(told).split())
    diagnosis = diagnose(log, we_terminated=TOLD[told])
    facts = [
        *(DIED[diagnosis.died], diagnosis.phase, diagnosis.exception, inner(diagnosis)),
        *("worker lost" * diagnosis.lost_worker, "open" * diagnosis.open_end),
    ]
    return f"{', '.join(filter(None, facts))}: {diagnosis.why}"


def test_the_table_of_diagnoses() -> None:
    rows = (TESTS / "golden" / "diagnoses.txt").read_text("utf-8").splitlines()[::2]
    assert len(rows) > 390
    assert_golden("diagnoses.txt", "".join(f"{row}\n    {diagnosed(row)}\n" for row in rows))
