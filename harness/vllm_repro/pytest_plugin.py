"""`pytest scenarios`: one test a scenario and arm.

An engine that should live and dies is a failure, with the trimmed traceback. Trouble of the host is an error. What this machine cannot
run is skipped, with the reason. A bug that is declared for this release and reproduces is xfailed; one that is declared and no longer
does is xpassed, and said aloud in a section of its own at the end. `-n K` runs K servers side by side; each asks for a free port, and
servers that use the GPUs take turns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_repro.errors import InfraError, ReproError, Unsupported
from vllm_repro.evidence import Evidence
from vllm_repro.host.machine import gpu_lock
from vllm_repro.report.model import ArmReport, RunReport
from vllm_repro.report.wording import death_line
from vllm_repro.running.run import Plan, default_out, run
from vllm_repro.running.watch import Patience
from vllm_repro.scenario.reader import load_file
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.kinds import ServerKind, kinds
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import ServerChoice, choose, open_site
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expect, Result, Standing

_EVIDENCE_REHEARSAL = ("vllm-repro-evidence", Evidence.REHEARSAL.value)
_OPTIONS = ("server", "image", "vllm", "model", "weights")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vllm-repro", "scenarios against live vLLM servers")
    group.addoption("--scenario-server", default="auto", help="auto, " + ", ".join(kinds(lambda facts: facts.started)))
    group.addoption("--scenario-image", default=None, help="the image to run")
    group.addoption("--scenario-vllm", default=None, help="the vLLM release")
    group.addoption("--scenario-model", default=None, help="a model in place of the stand-in")
    group.addoption("--scenario-weights", default=None, help="real or dummy")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What must not be overlooked: runs on the rehearsal engine, and bugs that are declared and no longer reproduce."""
    rehearsed = sum(
        _EVIDENCE_REHEARSAL in report.user_properties
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
    )
    if rehearsed:
        terminalreporter.section("REHEARSAL", sep="!", yellow=True, bold=True)
        terminalreporter.line(
            f"{rehearsed} of these ran on the rehearsal engine, which imitates vLLM: they say nothing about vLLM."
        )
    gone = [report for report in terminalreporter.stats.get("xpassed", ()) if _is_ours(report)]
    if gone:
        terminalreporter.section("NO LONGER REPRODUCES", sep="!", red=True, bold=True)
        for report in gone:
            word = "REHEARSAL: " if _EVIDENCE_REHEARSAL in report.user_properties else ""
            terminalreporter.line(
                f"{word}{report.nodeid}: declared for this release, and the engine lived. Is the scenario's status right?"
            )


def _is_ours(report: Any) -> bool:
    return any(name == "vllm-repro-evidence" for name, _ in report.user_properties)


def _is_scenario(path: Path) -> bool:
    """Python files that speak the vocabulary, wherever they are; pytest's own collector must never import one."""
    if path.suffix != ".py" or path.name.startswith(("_", "conftest", "test_")):
        return False
    return (
        re.search(
            r"^from vllm_repro\.vocabulary import", path.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
        )
        is not None
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Scenario files in a folder named `scenarios`; one that is named on the command line comes by the hook below."""
    if file_path.parent.name != "scenarios" or parent.session.isinitpath(file_path) or not _is_scenario(file_path):
        return None
    return ScenarioFile.from_parent(parent, path=file_path)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Takes a scenario file away from pytest's own collector, which would import it, and so run what a stranger wrote."""
    return ScenarioFile.from_parent(parent, path=module_path) if _is_scenario(module_path) else None


class ScenarioFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        scenario = load_file(self.path)
        for arm in scenario.arms:
            yield ScenarioItem.from_parent(self, name=f"{scenario.id}[{arm.name}]", scenario=scenario, arm=arm)


class SurpriseError(Exception):
    """What a failing scenario test raises: its text is the whole report of the failure."""


class ScenarioItem(pytest.Item):
    def __init__(self, *, scenario: Scenario, arm: Arm, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scenario = scenario
        self.arm = arm
        self.report: RunReport | None = None
        self.trouble: ReproError | None = None

    def setup(self) -> None:
        """The run itself, so that trouble of the host is an error and not a failure."""
        options = ServerOptions(
            **{name: value for name in _OPTIONS if (value := self.config.getoption(f"--scenario-{name}")) is not None}
        )
        auto = options.server == "auto"
        choice = (
            choose(self.scenario, options, download=False) if auto else ServerChoice(ServerKind(options.server), "")
        )
        try:
            site = open_site(self.scenario, options, choice, lambda _: None)
            with gpu_lock(needed=site.evidence is Evidence.GPU):
                plan = Plan(
                    self.scenario,
                    [self.arm],
                    1,
                    site,
                    Expect.DECLARED,
                    Patience(),
                    1,
                    default_out(),
                    f"pytest scenarios -k '{self.name}'",
                    options.vllm or site.kind.facts.release(self.scenario),
                    os.environ.get("VLLM_API_KEY"),  # a server that we start takes it from the same environment
                )
                self.report = run(plan, lambda _: None, lambda *_: None, None)
        except Unsupported as error:
            pytest.skip(_with_hint(error))
        # What travels with the result, also from the worker of another process.
        self.user_properties.append(("vllm-repro-evidence", self.report.evidence))
        if self.report.interrupted:
            raise KeyboardInterrupt
        outcome = self._arm().trials[0]
        if outcome.outcome is Outcome.UNSUPPORTED:
            pytest.skip(outcome.why)
        if outcome.outcome.facts.ci == "error":
            raise InfraError(f"{outcome.outcome}: {outcome.why}", hint=f"the log is {self.report.folder / outcome.log}")

    def _arm(self) -> ArmReport:
        assert self.report is not None
        return self.report.arms[0]

    def runtest(self) -> None:
        assert self.report is not None
        arm = self._arm()
        standing = self.scenario.status_of(self.arm).standing(self.report.version)
        # That an engine lives which does not have the bug at all says nothing.
        living = (Result.QUIET,) if self.report.imitated else ()
        told = arm.result.result in (Result.REPRODUCES, Result.FLAKY, *living)
        if arm.expected.has_bug and standing is Standing.BAD and told:
            # The open bug: pytest's own words for an expected failure, and the louder ones for an unexpected pass. Not for another
            # death: the marker would hide it.
            word = "REHEARSAL: " if self.report.rehearsal else ""
            reason = f"{word}{self.scenario.issue} is declared for {self.report.version}"
            self.add_marker(pytest.mark.xfail(reason=reason))
            if arm.result.result in (Result.REPRODUCES, Result.FLAKY):
                raise SurpriseError(_explain(self.report, arm))
            if arm.result.result is Result.QUIET:
                return
        if self.report.verdict.expected is False:
            raise SurpriseError(_explain(self.report, arm))
        if self.report.verdict.expected is None:
            lacking = "" if self.report.imitated else f"{self.report.verdict.because}; "
            pytest.skip(f"undecided: {lacking}{arm.trials[0].why}")

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None
    ) -> str:  # pytest's signature
        if isinstance(excinfo.value, ReproError):
            return _with_hint(excinfo.value)
        if isinstance(excinfo.value, SurpriseError):
            return str(excinfo.value)
        return str(excinfo.getrepr(style="short"))

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, 0, self.name


def _with_hint(error: ReproError) -> str:
    return f"{error}" + (f"\n  next: {error.hint}" if error.hint else "")


def _explain(report: RunReport, arm: ArmReport) -> str:
    trial = arm.trials[0]
    lines = [f"{report.scenario}, arm {arm.name}, vLLM {report.version}: {trial.outcome}"]
    if report.rehearsal:
        lines.insert(0, "REHEARSAL")
    if trial.death is not None:
        lines += [f"  {frame}" for frame in trial.death.frames[-8:]]
    lines += [trial.why, death_line(trial), f"report: {report.folder / 'report.md'}"]
    return "\n".join(line for line in lines if line)
