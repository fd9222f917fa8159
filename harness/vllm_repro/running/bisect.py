"""Bisection of one scenario over releases or commits: a run for each boot, and the record on disk after each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import replace

from vllm_repro.errors import InfraError
from vllm_repro.releases.imports import missing_names
from vllm_repro.releases.opened import opened_files
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import REQUIREMENTS, changed_files, is_release, version_of
from vllm_repro.report.bisection import Bisection, Candidate, Step, answer, bisection_dict, markdown
from vllm_repro.report.model import RunReport
from vllm_repro.report.version_map import row_of
from vllm_repro.running.job import Job
from vllm_repro.running.search import BootSearch
from vllm_repro.running.sweep import run_release
from vllm_repro.verdict.bisection import Answer
from vllm_repro.verdict.release_result import ReleaseResult

__all__ = ["BisectionSearch", "ScriptSearch"]

_INSTALL = 5.0
"""Cost of a release that is not in the cache, in boots of one that is: an install takes two to four minutes, a boot half of one."""


class BisectionSearch(BootSearch[Bisection, Candidate]):
    """Search of one change among candidates. `found` begins without steps."""

    verb, file = "bisect", "bisection"
    as_dict, as_markdown = staticmethod(bisection_dict), staticmethod(markdown)

    def _next(self) -> Candidate | None:
        if self.found.untouched is None:
            self.found = _read(self.found)
        number = self.found.search.choose(self._cost)
        return None if number is None else self.found.from_good[number]

    def _cost(self, number: int) -> float:
        facts, source = self.job.choice.kind.facts, self.found.from_good[number].source
        installs = is_release(source) and facts.runs_vllm and not facts.container  # a commit is laid out in seconds
        return _INSTALL if installs and ReleaseCache().get(source) is None else 1.0

    def _boot(self, chosen: Candidate) -> str | None:
        left = self.found.search.boots_left()
        self._progress.line(f"boot {len(self.found.steps) + 1}: {chosen.label} (about {left} left)")
        began, scenario = time.monotonic(), self.job.scenario
        report = run_release(self.job, chosen.source, self._progress, self._chosen, self._redactor)
        if isinstance(report, RunReport):
            if report.interrupted:
                return report.interrupted
            evidence = self.found.evidence
            assert evidence is not None, "a run has a site, and `_chosen` was called with it"
            version = version_of(chosen.source)
            row = row_of(report, version, scenario.status.standing(version), evidence)
        else:
            row = report
        (arm,) = (arm for arm in row.arms if arm.name == self.found.arm)
        step = Step(
            candidate=chosen.label, fate=arm.fate, why="", run=row.run, duration_s=round(time.monotonic() - began, 1)
        )
        if step.answer is Answer.SKIP:
            step = replace(step, why=row.why)
        self.found = replace(self.found, steps=(*self.found.steps, step))
        self._progress.line(f"  {step.answer}: {answer(self.found)}")
        return None


class ScriptSearch(BisectionSearch):
    """A bisection that asks a command of the user instead of a server."""

    def __init__(self, job: Job, found: Bisection, script: str) -> None:
        super().__init__(job, found)
        self._script = script
        self.found = replace(self.found, script=self._redactor.command(script))

    def _boot(self, chosen: Candidate) -> str | None:
        if announce := self._announce:
            self._announce = None
            announce(f"Script: {self._script}")
            self._save(None, 0.0)  # so that one that is killed in its first run can be resumed
        self._progress.line(
            f"run {len(self.found.steps) + 1}: {chosen.label} (about {self.found.search.boots_left()} left)"
        )
        began, why = time.monotonic(), ""
        try:
            release = ReleaseCache().provision(chosen.source, self._progress.line)
        except InfraError as error:
            fate, why = ReleaseResult.INFRA, self._redactor.text(f"{error}")
        else:
            more = {
                "VLLM_REPRO_SOURCE": chosen.source,
                "VLLM_REPRO_TREE": f"{release.packages}",
                "VLLM_REPRO_PYTHON": f"{release.python}",
            }
            status = _exit_status(self._script, {**os.environ, **more})
            if status not in _FATES:
                return f"exit status {status} of the script"
            fate, why = _FATES[status], "exit status 125" if status == _SKIP else ""
        took = round(time.monotonic() - began, 1)
        step = Step(candidate=chosen.label, fate=fate, why=why, run=None, duration_s=took)
        self.found = replace(self.found, steps=(*self.found.steps, step))
        self._progress.line(f"  {step.answer}: {answer(self.found)}")
        return None


_SKIP = 125
_FATES = {0: ReleaseResult.LIVES, 1: ReleaseResult.DIES, _SKIP: ReleaseResult.UNDECIDED}
"""By exit status of a script."""


def _exit_status(script: str, environment: dict[str, str]) -> int:
    """Run a shell command. Its output goes to the standard error, and its processes end with it."""
    process = subprocess.Popen(script, shell=True, env=environment, stdout=2, start_new_session=True)
    try:
        return process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read(found: Bisection) -> Bisection:
    """Return `found` with what the commits' files show, once both ends were booted: `untouched` and `missing`."""
    ends = found.candidates[0], found.candidates[-1]
    if not all(any(step.answer is not Answer.SKIP for step in found.of(end.label)) for end in ends):
        return found
    laid = [ReleaseCache().get(end.source) for end in ends if not is_release(end.source)]
    opened = [opened_files(release.packages) for release in laid if release]
    if len(opened) < 2 or not all(opened):
        return replace(found, untouched=())
    sources = [one.source for one in found.candidates]
    files = opened[0] | opened[1]
    changed = changed_files(sources)
    # Requirements are not opened by a server, and count all the same.
    irrelevant = {one for one, names in changed.items() if names.isdisjoint({*files, REQUIREMENTS})}
    missing = missing_names(sources, files)
    return replace(
        found,
        untouched=tuple(one.label for one in found.candidates if one.source in irrelevant),
        missing={one.label: tuple(sorted(missing[one.source])) for one in found.candidates if one.source in missing},
    )
