"""Bisection of one scenario over releases or commits: a run for each boot, and the record on disk after each."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace

from vllm_repro.errors import InfraError
from vllm_repro.releases.opened import opened_files
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import REQUIREMENTS, Source, changed_files
from vllm_repro.report.model import RunReport
from vllm_repro.running.elsewhere import results
from vllm_repro.running.job import Job
from vllm_repro_search.bisect.imports import missing_names
from vllm_repro_search.bisect.plan import Answer
from vllm_repro_search.bisect.record import Bisection, Candidate, Step, answer, bisection_dict, markdown
from vllm_repro_search.boot_search import BootSearch
from vllm_repro_search.versions.release_result import ReleaseResult
from vllm_repro_search.versions.sweep import run_release
from vllm_repro_search.versions.version_map import row_of

__all__ = ["BisectionSearch", "ScriptSearch"]

_INSTALL = 5.0
"""Cost of a release that is not in the cache, in boots of one that is: an install takes two to four minutes, a boot half of one."""


class BisectionSearch(BootSearch[Bisection, Sequence[Candidate]]):
    """Search of one change among candidates. `found` begins without steps. On a cluster with room it boots several at once."""

    verb, file = "bisect", "bisection"
    as_dict, as_markdown = staticmethod(bisection_dict), staticmethod(markdown)

    def _sources(self) -> list[Source | None]:
        return [self.found.candidates[0].source]

    def _next(self) -> Sequence[Candidate] | None:
        if self.found.untouched is None:
            self.found = _read(self.found)
        most = self.job.elsewhere.room(self.job) if self.job.elsewhere else 1
        if self._most_boots is not None:
            most = min(most, max(1, self._most_boots - len(self.found.steps)))
        return [self.found.from_good[number] for number in self.found.search.ahead(most, self._cost)] or None

    def _cost(self, number: int) -> float:
        facts, source = self.job.choice.kind.facts, self.found.from_good[number].source
        installs = source.release and facts.runs_vllm and not facts.container  # a commit is laid out in seconds
        return _INSTALL if installs and ReleaseCache().get(source) is None else 1.0

    def _boot(self, chosen: Sequence[Candidate]) -> str | None:
        left, first = self.found.search.boots_left(), len(self.found.steps) + 1
        for number, candidate in enumerate(chosen):
            beside = f", beside boot {first}" if number else f" (about {left} left)"
            self._progress.line(f"boot {first + number}: {candidate.label}{beside}")
        interrupted = None
        for candidate, ended in results(self._step, chosen, self.job.elsewhere):
            if isinstance(ended, str):
                interrupted = ended
                continue
            step = replace(ended, ahead=candidate is not chosen[0])
            with self._lock:
                self.found = replace(self.found, steps=(*self.found.steps, step))
                self._save(None, self.found.duration_s)
            which = f"{step.candidate}: " if len(chosen) > 1 else ""
            self._progress.line(f"  {which}{step.answer}: {answer(self.found)}")
        return interrupted

    def _step(self, candidate: Candidate) -> Step | str:
        """Boot one candidate. Return the signal that interrupted its run, if one did."""
        began = time.monotonic()
        report = run_release(self.job, candidate.source, self._progress, self._chosen, self._redactor)
        if isinstance(report, RunReport):
            if report.interrupted:
                return report.interrupted
            evidence = self.found.evidence
            assert evidence is not None, "a run has a site, and `_chosen` was called with it"
            version = candidate.source.version
            row = row_of(report, version, self.job.scenario.status.standing(version), evidence)
        else:
            row = report
        (arm,) = (arm for arm in row.arms if arm.name == self.found.arm)
        took = round(time.monotonic() - began, 1)
        step = Step(candidate=candidate.label, fate=arm.fate, why="", run=row.run, duration_s=took)
        return replace(step, why=row.why) if step.answer is Answer.SKIP else step


class ScriptSearch(BisectionSearch):
    """A bisection that asks a command of the user instead of a server."""

    def __init__(self, job: Job, found: Bisection, script: str) -> None:
        super().__init__(job, found)
        self._script = script
        self.found = replace(self.found, script=self._redactor.command(script))

    def _boot(self, chosen: Sequence[Candidate]) -> str | None:
        (candidate,) = chosen
        if announce := self._announce:
            self._announce = None
            announce(f"Script: {self._script}")
            self._save(None, 0.0)  # so that one that is killed in its first run can be resumed
        self._progress.line(
            f"run {len(self.found.steps) + 1}: {candidate.label} (about {self.found.search.boots_left()} left)"
        )
        began, why = time.monotonic(), ""
        try:
            release = ReleaseCache().provision(candidate.source, self._progress.line)
        except InfraError as error:
            fate, why = ReleaseResult.INFRA, self._redactor.text(f"{error}")
        else:
            more = {
                "VLLM_REPRO_SOURCE": f"{candidate.source}",
                "VLLM_REPRO_TREE": f"{release.packages}",
                "VLLM_REPRO_PYTHON": f"{release.python}",
            }
            status = _exit_status(self._script, {**os.environ, **more})
            if status not in _FATES:
                return f"exit status {status} of the script"
            fate, why = _FATES[status], "exit status 125" if status == _SKIP else ""
        took = round(time.monotonic() - began, 1)
        step = Step(candidate=candidate.label, fate=fate, why=why, run=None, duration_s=took)
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
    laid = [ReleaseCache().get(end.source) for end in ends if not end.source.release]
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
