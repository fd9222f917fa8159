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
from collections.abc import Iterable, Mapping

from vllm_repro.report.model import ArmReport, RunReport, TrialReport, counted_trials
from vllm_repro.report.source_changes import changed_files
from vllm_repro.report.tables import throughput_lead
from vllm_repro.report.text import printable, shorten
from vllm_repro.report.wording import crash_summary, first_of_each, not_run_word
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected, counted

_MESSAGE, _TEXT, _FRAMES = 1_000, 8_000, 10
"""Bytes of a message, bytes of a text, innermost frames of a traceback."""


def junit(report: RunReport) -> str:
    """Return a run's report as JUnit XML."""
    cases = [_arm_case(report, arm) for arm in report.arms if arm.trials]
    if report.killed or report.interrupted:
        cases += _interrupted_cases(report)
    states = [state.tag for case in cases for state in case]
    totals = {
        "tests": str(len(cases)),
        "failures": str(states.count("failure")),
        "errors": str(states.count("error")),
        "skipped": str(states.count("skipped")),
        "time": f"{report.duration_s:.3f}",
    }
    properties = (
        ("issue", report.issue),
        ("verdict", report.verdict.value),
        ("evidence", report.evidence),
        ("vllm_version", report.vllm_version or ""),
        ("notice", report.banner),
        *([("journal_cut", "true")] if report.journal_cut else []),
        *(("patched", text) for text in changed_files(report)),
        *(("throughput", text) for text in throughput_lead(report)),
    )
    shown = [element("property", {"name": name, "value": value}) for name, value in properties]
    suite = element(
        "testsuite",
        {"name": report.scenario, **totals, "timestamp": report.started_at},
        children=[element("properties", {}, children=shown), *cases],
    )
    return xml_text(element("testsuites", totals, children=[suite]))


def xml_text(root: ET.Element) -> str:
    """Return an XML tree as indented text with its declaration."""
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def element(
    tag: str, attributes: Mapping[str, str], text: str = "", children: Iterable[ET.Element] = ()
) -> ET.Element:
    """Return an XML element in which characters that XML forbids are replaced."""
    element = ET.Element(tag, {name: printable(value) for name, value in attributes.items()})
    element.text = printable(text) or None
    element.extend(children)
    return element


def _case(report: RunReport, name: str, time_s: float, *children: ET.Element) -> ET.Element:
    """Return a test case of the run's scenario; `children` are its failure, skip or output."""
    classname = f"{'REHEARSAL.' if report.rehearsal else ''}{report.scenario}"
    return element(
        "testcase",
        {"classname": classname, "name": name, "time": f"{time_s:.3f}"},
        children=children,
    )


def _interrupted_cases(report: RunReport) -> list[ET.Element]:
    """Return the cases of an interrupted run: an error, and a skip per arm without a trial."""
    how = (
        f"interrupted by {report.interrupted}"
        if report.interrupted
        else "killed, its journal is incomplete"
    )
    error = {"message": f"the run was {how}", "type": "cut"}
    skips = (
        (arm.name, element("skipped", {"message": f"{not_run_word(arm)}: the run was {how}"}))
        for arm in report.arms
        if not arm.trials
    )
    whole = ("the whole run", element("error", error, f"The run was {how}."))
    return [_case(report, name, 0.0, state) for name, state in (whole, *skips)]


def _arm_case(report: RunReport, arm: ArmReport) -> ET.Element:
    """Return the test case of an arm: a failure, error or skip if any, and its trials as text."""
    shown, more = first_of_each(arm.trials)
    texts = [
        f"trial {trial.number}: {trial.outcome}: {trial.why}\n  "
        + "\n  ".join(trial.trigger.evidence)
        for trial in shown
    ]
    output = "\n".join(shorten(text, _TEXT) for text in (*texts, *more)) + "\n"
    duration_s = sum(trial.duration_s or 0.0 for trial in arm.trials)
    states = [*_state(report, arm), element("system-out", {}, output)]
    return _case(report, arm.name, duration_s, *states)


def _state(report: RunReport, arm: ArmReport) -> list[ET.Element]:
    """Return the failure, error or skip of an arm, in a list; the list is empty if it passes."""
    trials = counted_trials(arm.trials)
    outcomes = [trial.outcome for trial in trials]
    failed = [trial for trial in trials if trial.severity is not None]
    worst = min(failed, key=lambda trial: trial.severity or 0, default=trials[0])
    trouble = next((trial for trial in trials if trial.outcome.facts.ci == "error"), None)
    undecided = report.as_expected is None
    untriggered = arm.expected is not Expected.UNTRIGGERED and {*outcomes} == {Outcome.UNTRIGGERED}
    untested = arm.patch_untried or (undecided and not report.imitated)
    # the first that holds
    tags = {
        "trouble": ("error", trouble is not None),
        "unsupported": ("skipped", {*outcomes} == {Outcome.UNSUPPORTED}),
        "surprise": ("failure", arm.name in report.surprises),
        # a crash of unknown cause is no pass
        "undecided": ("error", undecided and any(each.facts.other_failure for each in outcomes)),
        "untested": ("skipped", untested),
        "untriggered": ("skipped", untriggered),
    }
    name, tag = next(((name, tag) for name, (tag, holds) in tags.items() if holds), ("", ""))
    trial = trouble or worst
    message = f"{counted(outcomes)}: {shorten(' '.join(trial.why.split()), _MESSAGE)}"
    if name == "untested":
        message = shorten(report.because, _MESSAGE)
    if tag in ("", "skipped"):
        return [element(tag, {"message": message})] if tag else []
    text = shorten(_text(trial), _TEXT)
    return [element(tag, {"message": message, "type": trial.outcome}, text)]


def _text(trial: TrialReport) -> str:
    """Return a failed trial as text: innermost frames, reason, crash summary and log name."""
    frames = trial.death.frames[-_FRAMES:] if trial.death else ()
    lines = (*frames, trial.why, crash_summary(trial), f"log: {trial.log}")
    return "\n".join(filter(None, lines)) + "\n"
