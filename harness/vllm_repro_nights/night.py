"""Result of a nightly job: a light per scenario and one for the night, as Markdown and JUnit.

Green: every arm did what is declared for the release. Red: a surprise. Amber: a run was undecided,
interrupted or not reached in time, or the host had trouble. A scenario that this machine cannot run has no light.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from vllm_repro.report.format import seconds
from vllm_repro.report.junit import element, junit, xml_text
from vllm_repro.report.model import RunReport
from vllm_repro.report.text import LIMIT, Table, cell, markdown_table, plain, shorten
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_diagnosis.evidence import banner, facts_of

__all__ = ["Light", "Night", "Slot", "annotation", "light_of", "markdown", "suites"]


class Light(StrEnum):
    """Result of a scenario or of a night, worst first."""

    RED = "red"
    AMBER = "amber"
    CUT = "interrupted"
    LATE = "not reached"
    GREEN = "green"
    NONE = "unsupported"

    @property
    def status(self) -> int:
        """Return the exit status of `nightly`."""
        return _LIGHTS[self][0]

    @property
    def sign(self) -> str:
        """Return the sign in Markdown."""
        return _LIGHTS[self][1]


_LIGHTS: Mapping[Light, tuple[int, str, str]] = {
    Light.RED: (1, "❌", "surprise"),
    Light.AMBER: (2, "⚠️", "undecided"),
    Light.CUT: (2, "⏹️", "interrupted"),
    Light.LATE: (2, "⏳", "not reached in time"),
    Light.GREEN: (0, "✅", "as declared"),
    Light.NONE: (2, "➖", "not for this machine"),
}
"""Exit status, sign in Markdown, and words after a number of scenarios."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One scenario in a night. why: one sentence. report: None if it did not run."""

    scenario: str
    light: Light
    why: str
    report: RunReport | None = None


@dataclass(frozen=True, kw_only=True)
class Night:
    """All scenarios of a night.

    asked: the release or image, as a phrase. trouble: problems of the host. interrupted: the signal that ended the night.
    changes: what changed since the night before, a line each; None without such a night.
    """

    asked: str
    started_at: str
    slots: tuple[Slot, ...]
    trouble: tuple[str, ...] = ()
    interrupted: str | None = None
    changes: tuple[str, ...] | None = None

    @property
    def reports(self) -> list[RunReport]:
        """Return the reports of the scenarios that ran."""
        return [slot.report for slot in self.slots if slot.report is not None]

    @property
    def light(self) -> Light:
        """Return the worst light; amber if nothing ran."""
        lights = {slot.light for slot in self.slots}
        if Light.RED in lights:
            return Light.RED
        undecided = lights - {Light.GREEN, Light.NONE}
        if self.trouble or self.interrupted or undecided or Light.GREEN not in lights:
            return Light.AMBER
        return Light.GREEN

    @property
    def headline(self) -> str:
        """Return one line: `red: 1 surprise (tq-chunked-prefill), 5 as declared, 2 not for this machine`."""
        parts = [f"interrupted by {self.interrupted}"] if self.interrupted else []
        parts += [f"host trouble: {'; '.join(self.trouble)}"] if self.trouble else []
        for light, (_, _, words) in _LIGHTS.items():
            if names := [slot.scenario for slot in self.slots if slot.light is light]:
                many = "s" if light is Light.RED and len(names) > 1 else ""
                named = f" ({', '.join(names)})" if light in (Light.RED, Light.AMBER) else ""
                parts.append(f"{len(names)} {words}{many}{named}")
        return f"{self.light}: {', '.join(parts) or 'no scenario'}"


def light_of(report: RunReport) -> Light:
    """Return the light of a run; NONE if machine or release supports none of its boots, or the rehearsal does not have the bug."""
    outcomes = {trial.outcome for arm in report.arms for trial in arm.trials}
    if report.interrupted and report.as_expected is None:
        return Light.CUT
    no_bug = not report.imitated and report.as_expected is None
    if no_bug or (outcomes and outcomes <= {Outcome.UNSUPPORTED}):
        return Light.NONE
    return {True: Light.GREEN, False: Light.RED, None: Light.AMBER}[report.as_expected]


_SUMMARY_LIMIT = 12 * LIMIT
"""GitHub accepts 1 MiB of summaries per step."""


def markdown(night: Night) -> str:
    """Return the job summary."""
    parts = [f"# {night.light.sign} Nightly: {night.light}", plain(night.headline) + "."]
    for evidence in dict.fromkeys(report.evidence for report in night.reports):
        if notice := banner(evidence, None):
            parts.append(f"> **{notice}**")
    parts.append(f"Asked for: {cell(night.asked)}. Started {night.started_at}.")
    if night.trouble:
        parts.append("\n".join(f"- {cell(text)}" for text in night.trouble))
    if night.changes is not None:
        changed = "\n".join(f"- {cell(line)}" for line in night.changes) or "Nothing."
        parts.append(f"## What changed since the night before\n\n{changed}")
    listed = (Light.LATE, Light.NONE)  # below the table
    lit = [slot for light in Light if light not in listed for slot in night.slots if slot.light is light]
    groups: dict[str, list[Slot]] = {}
    mixed = len({report.evidence for report in night.reports}) > 1
    for slot in lit:
        heading = facts_of(slot.report.evidence).subject if slot.report is not None else "Without a run"
        groups.setdefault(heading if mixed else "", []).append(slot)
    heads = ("", "scenario", "verdict", "vLLM", "took", "why", "run")
    for heading, slots in groups.items():
        parts += [f"## {heading}"] if heading else []
        parts.append(markdown_table(Table(heads, tuple(map(_row, slots)))))
    for light, heading in ((Light.LATE, "Not reached in time"), (Light.NONE, "Not for this machine")):
        if others := [slot for slot in night.slots if slot.light is light]:
            lines = "\n".join(f"- {cell(slot.scenario)}: {cell(slot.why)}" for slot in others)
            parts.append(f"## {heading}\n\n{lines}")
    return shorten("\n\n".join(parts) + "\n", _SUMMARY_LIMIT)


def _row(slot: Slot) -> tuple[str, ...]:
    verdict = version = took = run = "-"
    if slot.report is not None:
        verdict, version = slot.report.verdict, slot.report.vllm_version or "-"
        took, run = seconds(slot.report.duration_s), slot.report.folder.name
    return slot.light.sign, slot.scenario, verdict, version, took, shorten(slot.why, 600), run


def suites(night: Night) -> str:
    """Return one JUnit file of the night.

    A scenario without a run becomes a case of the suite `nightly`: skipped if not supported, else an error.
    """
    root = ET.Element("testsuites")
    cases: list[ET.Element] = []
    for slot in night.slots:
        if slot.report is None:
            kind = "skipped" if slot.light is Light.NONE else "error"
            cases.append(_case(slot.scenario, kind, slot.why))
    if night.trouble:
        cases.append(_case("preflight", "error", "; ".join(night.trouble)))
    if night.interrupted:
        cases.append(_case("night", "error", f"interrupted by {night.interrupted}"))
    own = ET.SubElement(root, "testsuite", {"name": "nightly", "time": "0.000", "timestamp": night.started_at})
    own.extend(cases)
    for report in night.reports:
        root.extend(ET.fromstring(junit(report)).findall("testsuite"))
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        own.set(name, str(len(list(own.iter(tag)))))
        root.set(name, str(len(list(root.iter(tag)))))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in root.findall('testsuite')):.3f}")
    return xml_text(root)


def _case(name: str, kind: str, why: str) -> ET.Element:
    case = element("testcase", {"classname": "nightly", "name": name, "time": "0.000"})
    error = kind == "error"
    case.append(element(kind, {"message": why, **({"type": "infra"} if error else {})}, why if error else ""))
    return case


def annotation(night: Night) -> str:
    """Return a GitHub annotation, empty for green. It is the only way to show amber: a step is green or red."""
    if night.light is Light.GREEN:
        return ""
    text = " ".join(night.headline.split()).replace("%", "%25")
    return f"::{'error' if night.light is Light.RED else 'warning'} title=vllm-repro nightly::{text}"
