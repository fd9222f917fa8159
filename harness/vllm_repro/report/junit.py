"""JUnit XML of a run, for CI: a test case an arm.

failure: an engine did what was not expected of this release. error: trouble of the host. skipped: this machine cannot, or nothing was
proved; with the reason. A bug that is known to be open and reproduces is expected, and passes. A run that was killed has one case more,
an error: what it did not come to is no pass.

Held to what the readers of CI read (their sources): the attributes `name`, `classname` and `time` of a case, `message`, `type` and the text
of its failure or error, the `message` of a skip. Some show only the attribute and some only the text, so both say what happened.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping

from vllm_repro.report.budget import held
from vllm_repro.report.escape import printable
from vllm_repro.report.model import ArmReport, RunReport, TrialReport, banner, counting
from vllm_repro.report.patched import changed_files
from vllm_repro.report.wording import death_line, telling, unrun_word
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected, counted

__all__ = ["junit"]

_MESSAGE, _TEXT, _FRAMES = 1_000, 8_000, 10
"""Bytes of a message, which readers show in one line, and of the text below it; frames of the traceback, the innermost."""


def junit(report: RunReport) -> str:
    """The XML text, with declaration."""
    cases = [_case(report, arm) for arm in report.arms if arm.trials]
    if report.killed or report.interrupted:
        cases += _not_run(report)
    count = {kind: sum(case.find(kind) is not None for case in cases) for kind in ("failure", "error", "skipped")}
    attributes = {
        "name": report.scenario,
        "tests": str(len(cases)),
        "failures": str(count["failure"]),
        "errors": str(count["error"]),
        "skipped": str(count["skipped"]),
        "time": f"{report.duration_s:.3f}",
        "timestamp": report.started_at,
    }
    suite = _element("testsuite", attributes)
    properties = ET.SubElement(suite, "properties")
    for name, value in (
        ("issue", report.issue),
        ("verdict", report.verdict.verdict.value),
        ("evidence", report.evidence),
        ("vllm_version", report.version or ""),
        ("notice", banner(report.evidence, report.version)),
        *(("journal_cut", "true") for _ in range(report.cut)),
        *(("patched", text) for text in changed_files(report)),
    ):
        properties.append(_element("property", {"name": name, "value": value}))
    suite.extend(cases)
    root = _element("testsuites", {key: attributes[key] for key in ("tests", "failures", "errors", "skipped", "time")})
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _element(tag: str, attributes: Mapping[str, str], text: str = "") -> ET.Element:
    """With characters that XML has."""
    element = ET.Element(tag, {name: printable(value) for name, value in attributes.items()})
    element.text = printable(text) or None
    return element


def _classname(report: RunReport) -> str:
    return f"{'REHEARSAL.' if report.rehearsal else ''}{report.scenario}"


def _not_run(report: RunReport) -> list[ET.Element]:
    """Of a run that came to no end: that it did not, and the arms that it did not come to."""
    by = f"interrupted by {report.interrupted}" if report.interrupted else "killed, its journal is cut"
    named = {"classname": _classname(report), "time": "0.000"}
    whole = _element("testcase", {**named, "name": "the whole run"})
    whole.append(_element("error", {"message": f"the run was {by}", "type": "cut"}, f"The run was {by}."))
    cases = [whole]
    for arm in report.arms:
        if not arm.trials:
            case = _element("testcase", {**named, "name": arm.name})
            case.append(_element("skipped", {"message": f"{unrun_word(arm)}: the run was {by}"}))
            cases.append(case)
    return cases


def _case(report: RunReport, arm: ArmReport) -> ET.Element:
    seconds = sum(trial.duration_s or 0.0 for trial in arm.trials)
    named = {"classname": _classname(report), "name": arm.name, "time": f"{seconds:.3f}"}
    case = _element("testcase", named)
    trials = counting(arm.trials)
    outcomes = [trial.outcome for trial in trials]
    told = min(
        (trial for trial in trials if trial.failed is not None), key=lambda one: one.failed or 0, default=trials[0]
    )
    message = f"{counted(outcomes)}: {held(' '.join(told.why.split()), _MESSAGE)}"
    text = held(_text(told), _TEXT)
    if any(outcome.facts.ci == "error" for outcome in outcomes):
        trouble = next(trial for trial in trials if trial.outcome.facts.ci == "error")
        message = f"{counted(outcomes)}: {held(' '.join(trouble.why.split()), _MESSAGE)}"
        case.append(_element("error", {"message": message, "type": trouble.outcome}, held(_text(trouble), _TEXT)))
    elif all(outcome is Outcome.UNSUPPORTED for outcome in outcomes):
        case.append(_element("skipped", {"message": message}))
    elif arm.name in report.verdict.surprises:
        case.append(_element("failure", {"message": message, "type": told.outcome}, text))
    elif report.verdict.expected is None and any(outcome.facts.other_failure for outcome in outcomes):
        # Nobody can say what it died of, which is no pass.
        case.append(_element("error", {"message": message, "type": told.outcome}, text))
    elif arm.idle or (not report.imitated and report.verdict.expected is None):
        # A life that nothing can be concluded from is no pass.
        case.append(_element("skipped", {"message": held(report.verdict.because, _MESSAGE)}))
    elif all(outcome is Outcome.UNTRIGGERED for outcome in outcomes) and arm.expected is not Expected.UNTRIGGERED:
        case.append(_element("skipped", {"message": message}))
    shown, rest = telling(arm.trials)
    proofs = [f"trial {t.number}: {t.outcome}: {t.why}\n  " + "\n  ".join(t.trigger.evidence) for t in shown]
    case.append(_element("system-out", {}, "\n".join(held(one, _TEXT) for one in (*proofs, *rest)) + "\n"))
    return case


def _text(trial: TrialReport) -> str:
    """The traceback's end, what it came to, how it was seen, and where the whole log is."""
    frames = trial.death.frames[-_FRAMES:] if trial.death else ()
    return "\n".join(filter(None, (*frames, trial.why, death_line(trial), f"log: {trial.log}"))) + "\n"
