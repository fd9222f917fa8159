"""JUnit XML of a run, for CI: a test case an arm.

failure: an engine did what was not expected of this release. error: trouble of the host. skipped: this machine cannot, or nothing was
proved; with the reason. A bug that is known to be open and reproduces is expected, and passes.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from vllm_repro.outcome import Outcome
from vllm_repro.report.model import ArmReport, RunReport, banner
from vllm_repro.report.patched import changed_files
from vllm_repro.verdict import Expected

__all__ = ["junit"]

_ILLEGAL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")

_DIED = (Outcome.OTHER_CRASH, Outcome.HANG, Outcome.WRONG_OUTPUT)


def _clean(text: str) -> str:
    return _ILLEGAL.sub("\N{REPLACEMENT CHARACTER}", text)


def junit(report: RunReport) -> str:
    """The XML text, with declaration."""
    cases = [_case(report, arm) for arm in report.arms if arm.trials]
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
    suite = ET.Element("testsuite", attributes)
    properties = ET.SubElement(suite, "properties")
    for name, value in (
        ("issue", report.issue),
        ("verdict", report.verdict.verdict.value),
        ("evidence", report.evidence),
        ("vllm_version", report.version or ""),
        ("notice", banner(report.evidence, report.version)),
        *(("patched", text) for text in changed_files(report)),
    ):
        ET.SubElement(properties, "property", {"name": name, "value": _clean(value)})
    suite.extend(cases)
    root = ET.Element(
        "testsuites", {key: attributes[key] for key in ("tests", "failures", "errors", "skipped", "time")}
    )
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(report: RunReport, arm: ArmReport) -> ET.Element:
    seconds = sum(trial.duration_s or 0.0 for trial in arm.trials)
    prefix = "REHEARSAL." if report.rehearsal else ""
    case = ET.Element(
        "testcase", {"classname": f"{prefix}{report.scenario}", "name": arm.name, "time": f"{seconds:.3f}"}
    )
    outcomes = [trial.outcome for trial in arm.trials]
    telling = next((trial for trial in arm.trials if trial.death), arm.trials[0])
    message = _clean(f"{', '.join(outcomes)}: {telling.why}")
    if any(outcome in (Outcome.INFRA, Outcome.CANCELLED, Outcome.BOOT_FAILED) for outcome in outcomes):
        ET.SubElement(case, "error", {"message": message, "type": outcomes[0]})
    elif all(outcome is Outcome.UNSUPPORTED for outcome in outcomes):
        ET.SubElement(case, "skipped", {"message": message})
    elif arm.name in report.verdict.surprises:
        failure = ET.SubElement(case, "failure", {"message": message, "type": telling.outcome})
        if telling.death:
            failure.text = _clean("\n".join(telling.death.frames[-10:]) + f"\n{telling.why}\n")
    elif report.verdict.expected is None and any(outcome in _DIED for outcome in outcomes):
        # Nobody can say what it died of, which is no pass.
        ET.SubElement(case, "error", {"message": message, "type": telling.outcome})
    elif arm.idle:
        ET.SubElement(case, "skipped", {"message": _clean(report.verdict.because)})
    elif all(outcome is Outcome.UNTRIGGERED for outcome in outcomes) and arm.expected is not Expected.UNTRIGGERED:
        ET.SubElement(case, "skipped", {"message": message})
    out = ET.SubElement(case, "system-out")
    out.text = _clean(
        "\n".join(f"trial {t.number}: {t.outcome}: {t.why}\n  " + "\n  ".join(t.trigger.evidence) for t in arm.trials)
        + "\n"
    )
    return case
