"""Bisection of one scenario over releases or commits: a run for each boot, and the record on disk after each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vllm_repro.journal.redact import Redactor, known_secrets
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import is_release, version_of
from vllm_repro.report.bisection import Bisection, Candidate, Step, answer, bisection_dict, markdown
from vllm_repro.report.files import write_file
from vllm_repro.report.model import RunReport
from vllm_repro.report.version_map import row_of
from vllm_repro.running.folders import private_folders, private_hosts, stamped_folder
from vllm_repro.running.job import Job, first_line
from vllm_repro.running.resume import UnfinishedBisection
from vllm_repro.running.sweep import run_release
from vllm_repro.running.terminal import Progress
from vllm_repro.servers.site import Site
from vllm_repro.verdict.bisection import Answer

__all__ = ["bisect"]

_INSTALL = 5.0
"""Cost of a release that is not in the cache, in boots of one that is: an install takes two to four minutes, a boot half of one."""


def bisect(
    job: Job,
    bisection: Bisection,
    announce: Callable[[str], None],
    *,
    most_boots: int | None = None,
    most_seconds: float | None = None,
    unfinished: UnfinishedBisection | None = None,
) -> tuple[Bisection, Path]:
    """Boot one candidate after the other until the answer is known, and return the bisection and its folder.

    announce: called once with the first output line. most_boots: also counts boots of an earlier call. unfinished: resumed in its folder.
    Raises `UsageError`.
    """
    return _Bisect(job, bisection, announce, unfinished).run(most_boots, most_seconds)


class _Bisect:
    def __init__(
        self, job: Job, bisection: Bisection, announce: Callable[[str], None], unfinished: UnfinishedBisection | None
    ) -> None:
        self._job, self._announce = job, announce
        self._progress = Progress()
        self._redactor = Redactor(private_folders(), private_hosts(job.scenario), known_secrets(os.environ))
        self._bisection = replace(bisection, reproduce=self._redactor.command(bisection.reproduce))
        self._cache = ReleaseCache()
        self._folder: Path | None = None
        self._announced = False
        if unfinished is not None:
            unfinished.refuse_changed(json.loads(self._record()))
            self._folder = unfinished.folder
            old = {name: unfinished.head[name] for name in ("evidence", "started_at", "duration_s")}
            self._bisection = replace(self._bisection, steps=unfinished.steps(), **old)
        self._began = time.monotonic() - self._bisection.duration_s

    def run(self, most_boots: int | None, most_seconds: float | None) -> tuple[Bisection, Path]:
        began = time.monotonic()
        try:
            while (number := self._bisection.search.choose(self._cost)) is not None:
                done = len(self._bisection.steps)
                if most_boots is not None and done >= most_boots:
                    self._save(stopped=f"--max-boots {most_boots}")
                    break
                if most_seconds is not None and time.monotonic() - began >= most_seconds:
                    self._save(stopped=f"--max-time {most_seconds:g}s")
                    break
                candidate = self._bisection.from_good[number]
                left = self._bisection.search.boots_left()
                self._progress.line(f"boot {done + 1}: {candidate.label} (about {left} left)")
                interrupted = self._boot(candidate)
                self._save(stopped=interrupted)
                if interrupted:
                    break
            else:
                self._save()
        except KeyboardInterrupt as signal:
            # Between two runs, or in an install; a run takes the signals itself and reports what it saw.
            self._save(stopped=f"{signal}" or "SIGINT")
        assert self._folder is not None, "each way out saves"
        return self._bisection, self._folder

    def _cost(self, number: int) -> float:
        facts, source = self._job.choice.kind.facts, self._bisection.from_good[number].source
        installs = is_release(source) and facts.runs_vllm and not facts.container  # a commit is laid out in seconds
        return _INSTALL if installs and self._cache.get(source) is None else 1.0

    def _boot(self, candidate: Candidate) -> str | None:
        """Boot a candidate and add the step. Return the signal that interrupted its run; then there is no step."""
        began, scenario = time.monotonic(), self._job.scenario
        report = run_release(self._job, candidate.source, self._progress, self._chosen, self._redactor)
        if isinstance(report, RunReport):
            if report.interrupted:
                return report.interrupted
            evidence = self._bisection.evidence
            assert evidence is not None, "a run has a site, and `_chosen` was called with it"
            version = version_of(candidate.source)
            row = row_of(report, version, scenario.status.standing(version), evidence)
        else:
            row = report
        (arm,) = (arm for arm in row.arms if arm.name == self._bisection.arm)
        step = Step(
            candidate=candidate.label, fate=arm.fate, why="", run=row.run, duration_s=round(time.monotonic() - began, 1)
        )
        if step.answer is Answer.SKIP:
            step = replace(step, why=row.why)
        self._bisection = replace(self._bisection, steps=(*self._bisection.steps, step))
        self._progress.line(f"  {step.answer}: {answer(self._bisection)}")
        return None

    def _chosen(self, site: Site, why: str) -> None:
        if not self._announced:
            self._announced = True
            if not self._bisection.steps:
                self._bisection = replace(self._bisection, evidence=site.evidence.value)
            self._announce(first_line(site, why, None))

    def _save(self, stopped: str | None = None) -> None:
        duration = round(time.monotonic() - self._began, 1)
        self._bisection = replace(self._bisection, stopped=stopped, duration_s=duration)
        if self._folder is None:  # not before: a refused command must leave no folder
            self._folder = stamped_folder(self._job.out, Path(self._bisection.scenario) / "bisect")
        hint = "free some space, or name another --out"
        write_file(self._folder / "bisection.json", self._record(), hint=hint)
        write_file(self._folder / "bisection.md", self._redactor.text(markdown(self._bisection)), hint=hint)

    def _record(self) -> str:
        record = self._redactor.deep(bisection_dict(self._bisection))
        return json.dumps(record, indent=2, ensure_ascii=False) + "\n"
