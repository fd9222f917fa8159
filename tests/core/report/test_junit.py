"""JUnit as CI tools read it: junitparser, and the rules of three other readers.

The rules of mikepenz/action-junit-report and dorny/test-reporter for GitHub and of the
junit-annotate plugin for Buildkite are below, taken from their sources.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from junitparser import Error, Failure, JUnitXml, Property, Skipped, TestSuite

from tests.golden_files import assert_golden
from tests.report_examples import REHEARSAL, replace, report
from vllm_repro.report.junit import junit
from vllm_repro.report.model import RunReport, arm_fields, verdict_fields
from vllm_repro.verdict.outcome import Death, Outcome
from vllm_repro.verdict.verdict import Verdict, VerdictReport, arm_result

EXAMPLE = report(REHEARSAL)
# Typed, which the library's are not.
counted: Callable[[TestSuite], None] = TestSuite.update_statistics
listed: Callable[[TestSuite], Iterable[Property]] = TestSuite.properties
KINDS = {Failure: "failure", Error: "error", Skipped: "skipped"}


def mixed(
    why: str = "it died of this", message: str = "boom", frame: str = "vllm/a.py:f"
) -> RunReport:
    """Return one arm of each kind: expected, surprise, host trouble, unsupported."""
    death = Death(
        detected_by="answer",
        latency_s=0.1,
        exception="RuntimeError",
        message=message,
        frames=(frame,) * 30,
        signature=None,
        channels=("answer",),
    )
    outcomes = (Outcome.CLEAN, Outcome.CRASH, Outcome.INFRA, Outcome.UNSUPPORTED)
    arms = []
    for arm, outcome in zip(EXAMPLE.arms, outcomes, strict=False):
        died = death if outcome is Outcome.CRASH else None
        trial = replace(arm.trials[0], outcome=outcome, death=died, why=why)
        arms.append(
            replace(
                arm, trials=(trial,), **arm_fields(arm_result(arm.name, arm.expected, [outcome]))
            )
        )
    verdict = VerdictReport(
        verdict=Verdict.REGRESSED, expected=False, because="because", surprises=(arms[1].name,)
    )
    return replace(EXAMPLE, arms=tuple(arms), **verdict_fields(verdict))


def test_golden() -> None:
    assert_golden("junit-mixed.xml", junit(mixed()))


@pytest.mark.parametrize("source", [EXAMPLE, mixed()], ids=["example", "mixed"])
def test_junitparser_reads_what_was_meant(source: RunReport, tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(junit(source), encoding="utf-8")
    read = JUnitXml.fromfile(str(path))
    (suite,) = list(read)
    cases = list(suite)
    assert suite.name == source.scenario
    assert suite.time == pytest.approx(source.duration_s, abs=1e-3)
    assert [case.name for case in cases] == [arm.name for arm in source.arms if arm.trials]
    for case, arm in zip(cases, source.arms, strict=True):
        assert case.time == pytest.approx(
            sum(trial.duration_s or 0 for trial in arm.trials), abs=1e-3
        )
        assert len(case.result) <= 1
    before = (suite.tests, suite.failures, suite.errors, suite.skipped)
    counted(suite)  # its own count of what it read
    assert before == (suite.tests, suite.failures, suite.errors, suite.skipped)
    properties = {one.name: one.value for one in listed(suite)}
    assert (properties["issue"], properties["verdict"]) == (source.issue, source.verdict)
    if source.scenario == EXAMPLE.scenario and source.verdict is Verdict.REGRESSED:
        kinds = [KINDS[type(case.result[0])] if case.result else "passed" for case in cases]
        assert kinds == ["passed", "failure", "error", "skipped"]


def assert_read_by_github_and_buildkite(text: str) -> None:
    """Check that each case is read alike, and that something is shown of it.

    Both GitHub readers take `testsuites/testsuite/testcase`, count a case as failed by a failure or
    error, show the first one's `message` (dorny's with `type` before it) and its text; a case with
    `skipped` beside a failure would count as skipped for one and failed for the other. Buildkite's
    shows name, classname, message and text, and the message of a skip.
    """
    for case in ET.fromstring(text).findall("testsuite/testcase"):
        states = [one for one in case if one.tag in ("failure", "error", "skipped")]
        assert len(states) <= 1, "its readers would not agree"
        assert case.get("classname")
        float(case.get("time", ""))
        one = states[0] if states else None
        if one is None:
            continue
        message = one.get("message", "")
        assert message.strip(), "an empty message is taken for none"
        assert "\n" not in message, "it is shown on one line"
        if one.tag != "skipped":
            assert one.get("type")
            assert (one.text or "").strip(), "Buildkite's shows no box for it"


def test_the_traceback_is_trimmed() -> None:
    (failure,) = ET.fromstring(
        junit(mixed(why="x " * 50_000, frame="vllm/a.py:" + "f" * 3_000))
    ).iter("failure")
    assert len(failure.get("message", "")) < 1_100
    assert len(failure.text or "") <= 8_000


# What XML 1.0 has, by its grammar (section 2.2).
LEGAL = re.compile("[\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]*")
NASTY = [
    "\x00",
    "\x1b[31mred",
    "\x0c",
    "\ufffe",
    "\ud800",
    "]]>",
    "<![CDATA[",
    "&amp;",
    "--",
    "\u2028",
    "\r\n",
    "\x85",
]


@settings(max_examples=25)
@given(
    st.text(alphabet=st.characters(), max_size=60), st.sampled_from(NASTY), st.sampled_from(NASTY)
)
def test_only_characters_that_xml_has(text: str, one: str, other: str) -> None:
    for why, message in product((text + one, other + text), (one + other,)):
        made = junit(mixed(why=f"w {why}", message=message, frame=f"{why}:{message}"))
        assert LEGAL.fullmatch(made)
        assert_read_by_github_and_buildkite(made)
        JUnitXml.fromstring(made.encode())
