"""Result of a night: a light per scenario and one for the night, as Markdown and JUnit.

Green: every arm did what is declared for the release. Red: a surprise. Amber: a run was undecided,
interrupted or not reached in time, or the host had trouble. A scenario that this machine cannot run
has no light.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from pathlib import Path
from typing import Any

from vllm_repro.report.document import plain_text
from vllm_repro.report.format import seconds
from vllm_repro.report.junit import element, junit, xml_text
from vllm_repro.report.model import RunReport
from vllm_repro.report.runs import run_id
from vllm_repro.report.text import LIMIT, shorten
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Verdict
from vllm_repro_diagnosis.evidence import banner

# GitHub accepts 1 MiB of summaries per step.
_SUMMARY_LIMIT = 12 * LIMIT


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
        """Return the exit status of `nightly`: 0 for green, 1 for red, else 2."""
        return {Light.RED: 1, Light.GREEN: 0}.get(self, 2)


# Sign in Markdown, and words after a number of scenarios.
_LIGHTS: Mapping[Light, tuple[str, str]] = {
    Light.RED: ("❌", "surprise"),
    Light.AMBER: ("⚠️", "undecided"),
    Light.CUT: ("⏹️", "interrupted"),
    Light.LATE: ("⏳", "not reached in time"),
    Light.GREEN: ("✅", "as declared"),
    Light.NONE: ("➖", "not for this machine"),
}


# The bug shows, or the engine fails otherwise.
_BAD = {Verdict.REPRODUCES, Verdict.REGRESSED, Verdict.CHANGED}
# Lights of a run whose verdict states nothing.
_WITHOUT_VERDICT = {Light.NONE, Light.CUT, Light.LATE}


@dataclass(frozen=True, kw_only=True)
class ScenarioNight:
    """Result of one scenario in a night: its light, the reason, and its report."""

    scenario: str
    light: Light
    # one sentence
    why: str
    # None if it did not run
    report: RunReport | None = None
    # its column in the table by vLLM; empty in a night of one vLLM
    vllm: str = ""

    @property
    def name(self) -> str:
        """Return the scenario, and the vLLM in a night of several."""
        return f"{self.scenario} in {self.vllm}" if self.vllm else self.scenario


@dataclass(frozen=True, kw_only=True)
class Night:
    """Result of a night: its scenarios, trouble of the host, and what changed."""

    # the release or image that was asked for, as a phrase
    asked: str
    started_at: str
    scenarios: tuple[ScenarioNight, ...]
    # problems of the host
    trouble: tuple[str, ...] = ()
    # the signal that ended the night
    interrupted: str | None = None
    # a line for each change since the night before; None without such a night
    changes: tuple[str, ...] | None = None
    # names of the vLLMs to compare, in the order that was asked for; empty for one
    vllms: tuple[str, ...] = ()

    @property
    def reports(self) -> list[RunReport]:
        """Return the reports of the scenarios that ran."""
        return [result.report for result in self.scenarios if result.report is not None]

    @property
    def by_vllm(self) -> list[tuple[str, ...]]:
        """Return the verdicts of each scenario by vLLM, below the heads; empty for one vLLM.

        The last column names the first vLLM in which the bug shows, or the engine fails otherwise:
        `none` if it does in none, `-` if no vLLM proved anything.
        """
        rows: dict[str, dict[str, str]] = {}
        for result in self.scenarios if self.vllms else ():
            ran = result.report is not None and result.light not in _WITHOUT_VERDICT
            cell = f"{result.report.verdict if ran and result.report else result.light}"
            rows.setdefault(result.scenario, {})[result.vllm] = cell
        table = [("scenario", *self.vllms, "first bad")] if rows else []
        for scenario, cells in rows.items():
            quiet = "none" if {*cells.values()} & {Verdict.QUIET, Verdict.FIXED} else "-"
            first = next((vllm for vllm in self.vllms if cells.get(vllm) in _BAD), quiet)
            table.append((scenario, *(cells.get(vllm, "-") for vllm in self.vllms), first))
        return table

    @property
    def light(self) -> Light:
        """Return red after a surprise, green if all is as declared, else amber.

        Scenarios that this machine cannot run do not count. Amber, too, if nothing ran, the host
        had trouble, or a signal ended the night.
        """
        lights = {result.light for result in self.scenarios} - {Light.NONE}
        if Light.RED in lights:
            return Light.RED
        calm = lights == {Light.GREEN} and not self.trouble and not self.interrupted
        return Light.GREEN if calm else Light.AMBER

    @property
    def had_trouble(self) -> bool:
        """Return True if the host had trouble, or if the night shows nothing.

        It shows nothing if no boot tested an engine, or if no scenario is for this machine.
        """
        arms = [arm for report in self.reports for arm in report.arms]
        outcomes = {trial.outcome for arm in arms for trial in arm.trials}
        without_run = {result.light for result in self.scenarios if result.report is None}
        trouble = bool(self.trouble) or Light.AMBER in without_run or Outcome.INFRA in outcomes
        no_light = {result.light for result in self.scenarios} <= {Light.NONE}
        return trouble or no_light or not any(outcome.facts.tested for outcome in outcomes)

    @property
    def headline(self) -> str:
        """Return one line: `red: 1 surprise (tq-chunked-prefill), 5 as declared`."""
        parts = [f"interrupted by {self.interrupted}"] if self.interrupted else []
        parts += [f"host trouble: {'; '.join(self.trouble)}"] if self.trouble else []
        for light, (_, words) in _LIGHTS.items():
            if names := [result.name for result in self.scenarios if result.light is light]:
                many = "s" if light is Light.RED and len(names) > 1 else ""
                named = f" ({', '.join(names)})" if light in (Light.RED, Light.AMBER) else ""
                parts.append(f"{len(names)} {words}{many}{named}")
        return f"{self.light}: {', '.join(parts) or 'no scenario'}"


def judged(report: RunReport) -> ScenarioNight:
    """Return a scenario's result in the night, from the report of its run.

    It has no light if no boot can run on this machine and release, or if the rehearsal does not
    have the bug.
    """
    outcomes = {trial.outcome for arm in report.arms for trial in arm.trials}
    expected, why = report.as_expected, report.because
    light = {True: Light.GREEN, False: Light.RED, None: Light.AMBER}[expected]
    if report.interrupted and expected is None:
        light = Light.CUT
    elif outcomes and outcomes <= {Outcome.UNSUPPORTED}:
        light = Light.NONE
        why = next(trial.why for arm in report.arms for trial in arm.trials) or why
    elif not report.imitated and expected is None:
        light = Light.NONE
    return ScenarioNight(scenario=report.scenario, light=light, why=why, report=report)


def markdown(night: Night) -> str:
    """Return the night as Markdown, the summary of a CI job, cut to what GitHub accepts."""
    evidences = dict.fromkeys(report.evidence for report in night.reports)
    text = plain_text(
        "summary.md",
        Path(__file__).parent / "templates",
        night=night,
        banners=filter(None, (banner(evidence, None) for evidence in evidences)),
        results=[(light, *_LIGHTS[light]) for light in Light],
        seconds=seconds,
    )
    return shorten(f"{text}\n", _SUMMARY_LIMIT)


def suites(night: Night) -> str:
    """Return the night as the text of one JUnit file.

    The suite `nightly` has a case for each scenario without a run: skipped if this machine cannot
    run it, else an error. Trouble of the host and an interruption are errors in it.
    """
    cases = [
        (result.name, "skipped" if result.light is Light.NONE else "error", result.why)
        for result in night.scenarios
        if result.report is None
    ]
    cases += [("preflight", "error", problem) for problem in night.trouble]
    if night.interrupted:
        cases.append(("night", "error", f"interrupted by {night.interrupted}"))
    no_time = {"classname": "nightly", "time": "0.000"}
    states = [element(tag, {"message": why, "type": "infra"}, why) for _, tag, why in cases]
    suite = element(
        "testsuite",
        {"name": "nightly", "time": "0.000", "timestamp": night.started_at},
        children=[
            element("testcase", no_time | {"name": name}, children=[state])
            for (name, _, _), state in zip(cases, states, strict=True)
        ],
    )
    runs = [run for report in night.reports for run in ET.fromstring(junit(report))]
    time_s = sum(float(run.get("time", "0")) for run in runs)
    root = element("testsuites", {"time": f"{time_s:.3f}"}, children=[suite, *runs])
    counted = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}
    for part, (name, tag) in product((root, suite), counted.items()):
        part.set(name, str(sum(1 for _ in part.iter(tag))))
    return xml_text(root)


def as_values(night: Night) -> dict[str, Any]:
    """Return what `nightly --json` prints, without the folder."""
    return {
        "light": night.light,
        "headline": night.headline,
        "asked": night.asked,
        "started_at": night.started_at,
        "trouble": night.trouble,
        "interrupted": night.interrupted,
        "changes": night.changes,
        "runs": [
            {
                "scenario": result.scenario,
                "light": result.light,
                "why": result.why,
                "verdict": result.report and result.report.verdict,
                "evidence": result.report and result.report.evidence,
                "vllm_version": result.report and result.report.vllm_version,
                "run": result.report and run_id(result.report),
                "vllm": result.vllm,
            }
            for result in night.scenarios
        ],
    }


def annotation(night: Night) -> str:
    """Return a GitHub annotation: an error for red, a warning for amber; empty for green.

    Without it amber would not be visible: a step is green or red.
    """
    if night.light is Light.GREEN:
        return ""
    text = " ".join(night.headline.split()).replace("%", "%25")
    level = "error" if night.light is Light.RED else "warning"
    return f"::{level} title=vllm-repro nightly::{text}"
