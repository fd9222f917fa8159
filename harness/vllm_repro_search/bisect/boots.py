"""Bisection of one scenario over releases or commits: each boot is a run or a call of a script."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence

from msgspec.structs import replace

from vllm_repro.errors import InfraError, UsageError
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import Source
from vllm_repro.running.job import Job
from vllm_repro_search.bisect.plan import Side
from vllm_repro_search.bisect.record import Bisection, BisectionBoot, Candidate
from vllm_repro_search.boot_search import BootSearch
from vllm_repro_search.versions.record import ReleaseResult, ReleaseRow, row_of
from vllm_repro_search.versions.sweep import row_of_error, run_release

__all__ = ["BisectionSearch", "ScriptSearch"]

_INSTALL = 5.0
"""Cost of a release that is not in the cache, in boots of a cached one.

An install takes two to four minutes, a boot half a minute.
"""


class BisectionSearch(BootSearch[Bisection, Candidate]):
    """Search of one change among candidates. On a cluster with room it boots several at once."""

    def sources(self) -> Sequence[Source | None]:
        return [self.record.candidates[0].vllm]

    def next(self) -> Sequence[Candidate]:
        most = self.job.elsewhere.room(self.job) if self.job.elsewhere else 1
        if self.most_boots is not None:
            most = min(most, max(1, self.most_boots - len(self.record.boots)))
        self._round = [
            self.record.from_good[number] for number in self.record.plan.ahead(most, self._cost)
        ]
        return self._round

    def _cost(self, number: int) -> float:
        facts, source = self.job.choice.kind.facts, self.record.from_good[number].vllm
        # A commit is laid out in seconds.
        installs = source.release and facts.runs_vllm and not facts.container
        return _INSTALL if installs and ReleaseCache().get(source) is None else 1.0

    def describe(self, item: Candidate, number: int) -> str:
        first = len(self.record.boots) + 1
        left = f" (about {self.record.plan.boots_left()} left)"
        return f"boot {number}: {item.label}{left if number == first else f', beside boot {first}'}"

    def outcome(self, boot: BisectionBoot, *, several: bool) -> str:
        return f"{boot.candidate}: {boot.side}: " if several else f"{boot.side}: "

    def boot(self, item: Candidate) -> tuple[BisectionBoot | None, str | None]:
        began = time.monotonic()
        row = self._row(item.vllm)
        if isinstance(row, str):
            return None, row
        (arm,) = (arm for arm in row.arms if arm.name == self.record.arm)
        boot = self._finished(item, arm.fate, row.why, began)
        why = row.why if boot.side is Side.SKIP else ""
        return replace(boot, run=row.run, why=why, ahead=item is not self._round[0]), None

    def _row(self, source: Source) -> ReleaseRow | str:
        """Run the scenario on one candidate.

        Return the signal that interrupted the run, if one did.
        """
        try:
            result = run_release(self, source)
        except UsageError as error:
            if not self.record.boots:
                raise
            return row_of_error(self, source, error)
        if isinstance(result, ReleaseRow):
            return result
        standing = self.job.scenario.status.standing(source.version)
        row = row_of(result, source.version, standing, self.record.evidence)
        return result.interrupted or row

    def _finished(
        self, item: Candidate, fate: ReleaseResult, why: str, began: float
    ) -> BisectionBoot:
        took = round(time.monotonic() - began, 1)
        return BisectionBoot(candidate=item.label, fate=fate, why=why, run=None, duration_s=took)


class ScriptSearch(BisectionSearch):
    """A bisection that asks a command of the user instead of a server."""

    def __init__(self, job: Job, record: Bisection, script: str) -> None:
        super().__init__(job, record)
        self._script = script
        self.record = replace(self.record, script=self.redactor.command(script))

    def describe(self, item: Candidate, number: int) -> str:
        return super().describe(item, number).replace("boot", "run")

    def boot(self, item: Candidate) -> tuple[BisectionBoot | None, str | None]:
        self.announce(f"Script: {self._script}")
        began = time.monotonic()
        try:
            release = ReleaseCache().provision(item.vllm, self.progress.line)
        except InfraError as error:
            why = self.redactor.text(f"{error}")
            return self._finished(item, ReleaseResult.INFRA, why, began), None
        variables = {
            "VLLM_REPRO_SOURCE": item.source,
            "VLLM_REPRO_TREE": f"{release.packages}",
            "VLLM_REPRO_PYTHON": f"{release.python}",
        }
        status = _exit_status(self._script, os.environ | variables)
        if status not in _RESULTS:
            return None, f"exit status {status} of the script"
        why = f"exit status {status}" if status == _SKIP else ""
        return self._finished(item, _RESULTS[status], why, began), None


_SKIP = 125
_RESULTS = {0: ReleaseResult.LIVES, 1: ReleaseResult.DIES, _SKIP: ReleaseResult.UNDECIDED}
"""By exit status of a script."""


def _exit_status(script: str, environment: dict[str, str]) -> int:
    """Run a shell command. Its output goes to the standard error, and its processes end with it."""
    process = subprocess.Popen(
        script, shell=True, env=environment, stdout=2, start_new_session=True
    )
    try:
        return process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
