"""What a night came to: a light for each scenario, and one for the night. Pure.

green: every arm did what is declared for this release. red: a surprise. amber: nothing can be said, because a run decided nothing or the
host had trouble. A scenario that this machine cannot run has no light, and takes none from the others.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from vllm_repro.report.budget import LIMIT, held
from vllm_repro.report.escape import cell, plain, printable
from vllm_repro.report.model import RunReport, banner
from vllm_repro.report.wording import seconds
from vllm_repro.verdict.outcome import Outcome

__all__ = ["Light", "Night", "Slot", "annotation", "light_of", "markdown", "suites"]


class Light(StrEnum):
    GREEN = "green"
    AMBER = "amber"
    RED = "red"
    NONE = "unsupported"

    @property
    def status(self) -> int:
        """The exit status of a night: that of `run`, too."""
        return {Light.GREEN: 0, Light.RED: 1}.get(self, 2)


@dataclass(frozen=True)
class Slot:
    """One scenario's part of a night. why: one sentence. needs: of hardware. run: the name of its folder, None where there was no run."""

    scenario: str
    light: Light
    why: str
    needs: str = ""
    verdict: str = ""
    version: str | None = None
    evidence: str = ""
    seconds: float | None = None
    run: str | None = None


@dataclass(frozen=True)
class Night:
    """asked: the release or image that was asked for, as a phrase. trouble: of the host, found before anything was booted, or in copying a
    report. interrupted: the signal that ended it."""

    asked: str
    started_at: str
    slots: tuple[Slot, ...]
    trouble: tuple[str, ...] = ()
    interrupted: str | None = None

    @property
    def light(self) -> Light:
        """Red outweighs amber, which outweighs green; a night in which nothing ran says nothing."""
        lights = {slot.light for slot in self.slots}
        if Light.RED in lights:
            return Light.RED
        if self.trouble or self.interrupted or Light.AMBER in lights or Light.GREEN not in lights:
            return Light.AMBER
        return Light.GREEN

    @property
    def headline(self) -> str:
        """One line for people: `red: 1 surprise (tq-chunked-prefill), 5 as declared, 2 not for this machine`."""
        count = Counter(slot.light for slot in self.slots)
        words = {
            Light.RED: "surprise" + ("s" if count[Light.RED] > 1 else ""),
            Light.AMBER: "undecided",
            Light.GREEN: "as declared",
            Light.NONE: "not for this machine",
        }
        named = {light: ", ".join(slot.scenario for slot in self.slots if slot.light is light) for light in words}
        parts = [
            f"{count[light]} {word}" + (f" ({named[light]})" if light in (Light.RED, Light.AMBER) else "")
            for light, word in words.items()
            if count[light]
        ]
        if self.trouble:
            parts.insert(0, f"trouble of the host: {'; '.join(self.trouble)}")
        if self.interrupted:
            parts.insert(0, f"interrupted by {self.interrupted}")
        return f"{self.light}: {', '.join(parts) or 'no scenario'}"


def light_of(report: RunReport) -> Light:
    """Of one run. None where its boots all were refused by machine or release, or a rehearsal does not have the bug."""
    outcomes = {trial.outcome for arm in report.arms for trial in arm.trials}
    unheard = not report.imitated and report.verdict.expected is None
    if unheard or (outcomes and outcomes <= {Outcome.UNSUPPORTED}):
        return Light.NONE
    return {True: Light.GREEN, False: Light.RED, None: Light.AMBER}[report.verdict.expected]


_SIGNS = {Light.RED: "❌", Light.AMBER: "⚠️", Light.GREEN: "✅", Light.NONE: "➖"}
_ORDER = (Light.RED, Light.AMBER, Light.GREEN, Light.NONE)
_SUMMARY_LIMIT = 12 * LIMIT
"""GitHub takes a mebibyte of all summaries of a step."""


def markdown(night: Night) -> str:
    """The job's summary: the answer first, what needs a person next, then the rest."""
    parts = [f"# {_SIGNS[night.light]} Nightly: {night.light}", plain(night.headline) + "."]
    for evidence in dict.fromkeys(slot.evidence for slot in night.slots if slot.evidence):
        if notice := banner(evidence, None):
            parts.append(f"> **{notice}**")
    parts.append(f"Asked for: {cell(night.asked)}. Started {night.started_at}.")
    if night.trouble:
        parts.append("\n".join(f"- {cell(text)}" for text in night.trouble))
    ran = sorted(
        (slot for slot in night.slots if slot.light is not Light.NONE), key=lambda slot: _ORDER.index(slot.light)
    )
    if ran:
        parts.append(_table(ran))
    if others := [slot for slot in night.slots if slot.light is Light.NONE]:
        lines = "\n".join(f"- {cell(slot.scenario)}: {cell(slot.why)}" for slot in others)
        parts.append(f"## Not for this machine\n\n{lines}")
    return held("\n\n".join(parts) + "\n", _SUMMARY_LIMIT)


def _table(slots: Sequence[Slot]) -> str:
    lines = ["| | scenario | verdict | vLLM | took | why | run |", "|---|---|---|---|---|---|---|"]
    for slot in slots:
        cells = (
            slot.scenario,
            slot.verdict or "-",
            slot.version or "-",
            seconds(slot.seconds),
            held(slot.why, 600),
            slot.run or "-",
        )
        lines.append(f"| {_SIGNS[slot.light]} | " + " | ".join(map(cell, cells)) + " |")
    return "\n".join(lines)


def suites(night: Night, runs: Iterable[str]) -> str:
    """One JUnit file of the night. runs: that of each run, as `report.junit` made it. What had no run is a case of a suite `nightly`:
    trouble an error, what is not for this machine skipped with its needs."""
    root = ET.Element("testsuites")
    cases: list[ET.Element] = []
    for slot in night.slots:
        if slot.run is None:
            kind = "skipped" if slot.light is Light.NONE else "error"
            cases.append(_case(slot.scenario, kind, slot.why))
    if night.trouble:
        cases.append(_case("preflight", "error", "; ".join(night.trouble)))
    if night.interrupted:
        cases.append(_case("the whole night", "error", f"interrupted by {night.interrupted}"))
    own = ET.SubElement(root, "testsuite", {"name": "nightly", "time": "0.000", "timestamp": night.started_at})
    own.extend(cases)
    for text in runs:
        root.extend(ET.fromstring(text).findall("testsuite"))
    for name, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        own.set(name, str(len(list(own.iter(tag)))))
        root.set(name, str(len(list(root.iter(tag)))))
    root.set("time", f"{sum(float(suite.get('time', '0')) for suite in root.findall('testsuite')):.3f}")
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(name: str, kind: str, why: str) -> ET.Element:
    case = ET.Element("testcase", {"classname": "nightly", "name": printable(name), "time": "0.000"})
    said = ET.SubElement(case, kind, {"message": printable(why)})
    if kind == "error":
        said.set("type", "infra")
        said.text = printable(why)
    return case


def annotation(night: Night) -> str:
    """GitHub's own command for a mark beside the job; a step has no third colour, so that is where amber shows."""
    if night.light is Light.GREEN:
        return ""
    text = " ".join(night.headline.split()).replace("%", "%25")
    return f"::{'error' if night.light is Light.RED else 'warning'} title=vllm-repro nightly::{text}"
