"""Tests that `pytest scenarios` collects: one for each scenario and arm.

A crash of an engine that should live is a failure, with the trimmed traceback. Trouble of the host
is an error. What this machine cannot run is skipped, with the reason. A bug that is declared for
this release is xfailed if it reproduces, else xpassed. With `-n K` K servers run side by side on
free ports; those that use GPUs lease them.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_repro.errors import ReproError, Unsupported
from vllm_repro.releases.sources import parse_source
from vllm_repro.report.model import ArmReport, RunReport
from vllm_repro.report.wording import crash_summary
from vllm_repro.running.folders import default_out
from vllm_repro.running.job import Job, choice_of, refuse_unused_options
from vllm_repro.running.run import run_one
from vllm_repro.running.state import MeasureOptions
from vllm_repro.running.terminal import Progress
from vllm_repro.scenario.reader import load_file
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.options import ServerOptions
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Result, Standing

_OPTIONS = ("server", "image", "vllm", "model", "weights")


class ScenarioFile(pytest.File):
    """A scenario file as a pytest collector: one test for each arm."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield a test for each arm; raise CollectError if the scenario cannot be read."""
        try:
            scenario = load_file(self.path)
        except ReproError as error:
            raise self.CollectError(_with_hint(error)) from error
        for arm in scenario.arms:
            yield ScenarioItem.from_parent(
                self, name=f"{scenario.id}[{arm.name}]", scenario=scenario, arm=arm
            )


class ScenarioItem(pytest.Item):
    """A pytest test that runs one arm of a scenario on a server."""

    def __init__(self, *, scenario: Scenario, arm: Arm, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.scenario = scenario
        self.arm = arm
        self.report: RunReport | None = None

    def setup(self) -> None:
        """Do the run, keep its report, and skip the test if this machine cannot run it.

        Trouble of the host fails here, because pytest reports it as an error, not as a failure. An
        interrupted run raises `KeyboardInterrupt`.
        """
        try:
            self.report = self._run()
        except Unsupported as error:
            pytest.skip(_with_hint(error))
        except ReproError as error:
            pytest.fail(_with_hint(error), pytrace=False)
        # User properties travel with the result, also from the worker of another process.
        self.user_properties.append(("vllm-repro-evidence", self.report.evidence))
        if self.report.interrupted:
            raise KeyboardInterrupt
        trial = self.report.arms[0].trials[0]
        if trial.outcome is Outcome.UNSUPPORTED:
            pytest.skip(trial.why)
        if trial.outcome.facts.ci == "error":
            log = self.report.folder / trial.log
            pytest.fail(f"{trial.outcome}: {trial.why}\n  next: the log is {log}", pytrace=False)

    def _run(self) -> RunReport:
        """Run the arm once, on the server that the `--scenario-*` options choose.

        Raises `ReproError`, such as `Unsupported`.
        """
        values = {name: self.config.getoption(f"--scenario-{name}") for name in _OPTIONS}
        # here: pytest-xdist sends options as plain data
        values["vllm"] = values["vllm"] and parse_source(values["vllm"])
        options = ServerOptions(
            **{name: value for name, value in values.items() if value is not None}
        )
        choice = choice_of(self.scenario, options, download=False)
        refuse_unused_options(options, choice.kind)
        job = Job(
            name=self.scenario.id,
            scenario=self.scenario,
            options=options,
            choice=choice,
            arms=[self.arm],
            named_arms=[self.arm.name],
            trials=1,
            seed=1,
            out=default_out(),
            reproduce=shlex.join(["pytest", self.nodeid]),
            measure=MeasureOptions(
                False if self.config.getoption("--scenario-no-throughput") else None
            ),
        )
        return run_one(job, Progress(io.StringIO()))

    def runtest(self) -> None:
        """Pass, fail, xfail or skip by the verdict on the run that `setup` did."""
        report = self.report
        assert report is not None
        arm = report.arms[0]
        standing = self.scenario.status_of(self.arm).standing(report.vllm_version)
        # A rehearsal of a bug that it does not imitate lives in any case.
        decided = (
            (Result.REPRODUCES, Result.FLAKY, Result.QUIET)
            if report.imitated
            else (Result.REPRODUCES, Result.FLAKY)
        )
        if arm.expected.has_bug and standing is Standing.BAD and arm.result in decided:
            # xfail only this bug: the marker would hide any other death.
            word = "REHEARSAL: " if report.rehearsal else ""
            reason = f"{word}{self.scenario.issue} is declared for {report.vllm_version}"
            self.add_marker(pytest.mark.xfail(reason=reason))
            if arm.result is Result.QUIET:
                return
            pytest.fail(_explain(report, arm), pytrace=False)
        if report.as_expected is False:
            pytest.fail(_explain(report, arm), pytrace=False)
        if report.as_expected is None:
            missing = "" if report.imitated else f"{report.because}; "
            pytest.skip(f"undecided: {missing}{arm.trials[0].why}")

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return what pytest prints of the test: the scenario's file, line 0 and the name."""
        return self.path, 0, self.name


def _with_hint(error: ReproError) -> str:
    """Return an error's text, with its hint on a second line."""
    return f"{error}" + (f"\n  next: {error.hint}" if error.hint else "")


def _explain(report: RunReport, arm: ArmReport) -> str:
    """Return the text of a failed test: outcome, last frames, reason and path of the report."""
    trial = arm.trials[0]
    frames = trial.death.frames[-8:] if trial.death else ()
    lines = [
        "REHEARSAL" if report.rehearsal else "",
        f"{report.scenario}, arm {arm.name}, vLLM {report.vllm_version}: {trial.outcome}",
        *(f"  {frame}" for frame in frames),
        trial.why,
        crash_summary(trial),
        f"report: {report.folder / 'report.md'}",
    ]
    return "\n".join(filter(None, lines))
