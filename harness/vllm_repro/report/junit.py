"""JUnit XML of a run, for CI: a test case per arm.

failure: an engine did what is not declared for this release. error: trouble of the host, or an
interrupted run. skipped: this machine cannot run it, or it proved nothing. A known open bug that
reproduces passes.

CI systems read the attributes `name`, `classname` and `time` of a case, and `message`, `type` and
text of a failure or error. Some show only the message and some only the text, so both state what
happened.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping

from vllm_repro.report.model import ArmReport, RunReport, TrialReport, counted_trials
from vllm_repro.report.source_changes import changed_files
from vllm_repro.report.text import printable, shorten
from vllm_repro.report.wording import crash_summary, first_of_each, not_run_word
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected, counted
from vllm_repro_diagnosis.evidence import banner

__all__ = ["element", "junit", "xml_text"]

_MESSAGE, _TEXT, _FRAMES = 1_000, 8_000, 10
"""Bytes of a message, bytes of a text, innermost frames of a traceback."""


def junit(report: RunReport) -> str:
    """Return the XML with its declaration."""
    cases = [_case(report, arm) for arm in report.arms if arm.trials]
    if report.killed or report.interrupted:
        cases += _not_run(report)
    count = {
        kind: sum(case.find(kind) is not None for case in cases)
        for kind in ("failure", "error", "skipped")
    }
    totals = {
        "tests": str(len(cases)),
        "failures": str(count["failure"]),
        "errors": str(count["error"]),
        "skipped": str(count["skipped"]),
        "time": f"{report.duration_s:.3f}",
    }
    properties = ET.Element("properties")
    for name, value in (
        ("issue", report.issue),
        ("verdict", report.verdict.value),
        ("evidence", report.evidence),
        ("vllm_version", report.vllm_version or ""),
        ("notice", banner(report.evidence, report.vllm_version)),
        *([("journal_cut", "true")] if report.journal_cut else []),
        *(("patched", text) for text in changed_files(report)),
    ):
        properties.append(element("property", {"name": name, "value": value}))
    suite = element(
        "testsuite", {"name": report.scenario, **totals, "timestamp": report.started_at}
    )
    suite.extend([properties, *cases])
    root = element("testsuites", totals)
    root.append(suite)
    return xml_text(root)


def xml_text(root: ET.Element) -> str:
    """Return the indented XML with its declaration."""
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def element(tag: str, attributes: Mapping[str, str], text: str = "") -> ET.Element:
    """Return an element with only those characters that XML allows."""
    element = ET.Element(tag, {name: printable(value) for name, value in attributes.items()})
    element.text = printable(text) or None
    return element


def _testcase(report: RunReport, name: str, time_s: float) -> ET.Element:
    classname = f"{'REHEARSAL.' if report.rehearsal else ''}{report.scenario}"
    return element("testcase", {"classname": classname, "name": name, "time": f"{time_s:.3f}"})


def _not_run(report: RunReport) -> list[ET.Element]:
    """Return the cases of an interrupted run: an error, and a skip per arm that did not run."""
    by = (
        f"interrupted by {report.interrupted}"
        if report.interrupted
        else "killed, its journal is incomplete"
    )
    whole = _testcase(report, "the whole run", 0.0)
    whole.append(
        element("error", {"message": f"the run was {by}", "type": "cut"}, f"The run was {by}.")
    )
    cases = [whole]
    for arm in report.arms:
        if not arm.trials:
            case = _testcase(report, arm.name, 0.0)
            case.append(element("skipped", {"message": f"{not_run_word(arm)}: the run was {by}"}))
            cases.append(case)
    return cases


def _case(report: RunReport, arm: ArmReport) -> ET.Element:
    case = _testcase(report, arm.name, sum(trial.duration_s or 0.0 for trial in arm.trials))
    if (state := _state(report, arm)) is not None:
        case.append(state)
    shown, more = first_of_each(arm.trials)
    texts = [
        f"trial {t.number}: {t.outcome}: {t.why}\n  " + "\n  ".join(t.trigger.evidence)
        for t in shown
    ]
    case.append(
        element(
            "system-out", {}, "\n".join(shorten(text, _TEXT) for text in (*texts, *more)) + "\n"
        )
    )
    return case


def _state(report: RunReport, arm: ArmReport) -> ET.Element | None:
    """Return the failure, error or skip of an arm; None if it passes."""
    trials = counted_trials(arm.trials)
    outcomes = [trial.outcome for trial in trials]
    failed = sorted(
        (trial for trial in trials if trial.severity is not None),
        key=lambda trial: trial.severity or 0,
    )
    worst = next(iter(failed), trials[0])

    def state(tag: str, trial: TrialReport) -> ET.Element:
        message = f"{counted(outcomes)}: {shorten(' '.join(trial.why.split()), _MESSAGE)}"
        if tag == "skipped":
            return element(tag, {"message": message})
        return element(
            tag, {"message": message, "type": trial.outcome}, shorten(_text(trial), _TEXT)
        )

    if trouble := next((trial for trial in trials if trial.outcome.facts.ci == "error"), None):
        return state("error", trouble)
    if all(outcome is Outcome.UNSUPPORTED for outcome in outcomes):
        return state("skipped", worst)
    if arm.name in report.surprises:
        return state("failure", worst)
    if report.as_expected is None and any(outcome.facts.other_failure for outcome in outcomes):
        return state("error", worst)  # a crash of unknown cause is no pass
    if arm.patch_untried or (not report.imitated and report.as_expected is None):
        return element("skipped", {"message": shorten(report.because, _MESSAGE)})
    if (
        all(outcome is Outcome.UNTRIGGERED for outcome in outcomes)
        and arm.expected is not Expected.UNTRIGGERED
    ):
        return state("skipped", worst)
    return None


def _text(trial: TrialReport) -> str:
    frames = trial.death.frames[-_FRAMES:] if trial.death else ()
    return (
        "\n".join(filter(None, (*frames, trial.why, crash_summary(trial), f"log: {trial.log}")))
        + "\n"
    )
