"""Bisection of one scenario over releases or commits: a run for each boot, and the record on disk after each."""

from __future__ import annotations

import time
from dataclasses import replace

from vllm_repro.releases.imports import missing_names
from vllm_repro.releases.opened import opened_files
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import REQUIREMENTS, changed_files, is_release, version_of
from vllm_repro.report.bisection import Bisection, Candidate, Step, answer, bisection_dict, markdown
from vllm_repro.report.model import RunReport
from vllm_repro.report.version_map import row_of
from vllm_repro.running.search import BootSearch
from vllm_repro.running.sweep import run_release
from vllm_repro.verdict.bisection import Answer

__all__ = ["BisectionSearch"]

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
