"""Reports of other programs on the end of a server, each wording in several spellings."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.diagnosis.logs import DATA
from vllm_repro_diagnosis.diagnosis import diagnose
from vllm_repro_diagnosis.outside import _ROWS, Meaning, report_of

LINES = [
    tuple(line.split(maxsplit=1)) for line in (DATA / "outside.txt").read_text("utf-8").splitlines()
]
ALIVE = """\
(APIServer pid=1) INFO 09-14 02:10:11 [utils.py:233] vLLM API server version 0.15.0
(EngineCore_DP0 pid=88) INFO 09-14 02:10:31 [core.py:96] Initializing a V1 LLM engine (v0.15.0)
(APIServer pid=1) INFO:     Application startup complete.
"""
DIED = {Meaning.KILLED: True, Meaning.RUNNING: False}


@pytest.mark.parametrize(("meaning", "line"), LINES)
def test_a_report(meaning: str, line: str) -> None:
    report = report_of(line)
    assert (report.meaning if report else "-") == meaning
    diagnosis = diagnose(ALIVE + line)
    assert diagnosis.died is (DIED.get(Meaning(meaning)) if report else None)
    # the answer quotes the line, without the prefix of a log collector
    # a container that did not start is not the one whose log this is
    told = report is not None and report.meaning is not Meaning.NOT_STARTED
    assert (re.split("[ ,]", line.rstrip(" ,"))[-1] in diagnosis.why) is told
    answer = '\n(APIServer pid=1) INFO:     1.2.3.4:5 - "POST /v1/completions HTTP/1.1" 200 OK'
    for answers in (1, 3):
        assert diagnose(ALIVE + line + answer * answers).died is not True


def test_each_row_of_the_table_has_a_line() -> None:
    reporters = Counter(report.reporter for _, line in LINES if (report := report_of(line)))
    assert {reporter for reporter, _, _ in _ROWS} <= set(reporters)
