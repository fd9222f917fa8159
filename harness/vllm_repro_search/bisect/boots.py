"""Bisection of one scenario over releases or commits: its record, and its boots.

Each boot is a run or a call of a script.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from msgspec.structs import replace

from vllm_repro.errors import InfraError, UsageError
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import Source
from vllm_repro.report.format import limited
from vllm_repro.running.job import Job
from vllm_repro.verdict.verdict import Expected
from vllm_repro_search.bisect.candidates import Candidate
from vllm_repro_search.bisect.plan import BisectionPlan, BootResult, ChangePoints, Side
from vllm_repro_search.boot_search import BootSearch
from vllm_repro_search.plan import SearchState
from vllm_repro_search.record import SearchRecord
from vllm_repro_search.versions.record import ReleaseResult
from vllm_repro_search.versions.verb import row_of_error, run_release

_SIDES = {
    ReleaseResult.LIVES: Side.GOOD,
    ReleaseResult.DIES: Side.BAD,
    ReleaseResult.SOMETIMES: Side.BAD,
}
"""Side of a boot by its result. Any other result is a skip."""

_MOST_ALIKE = 3
"""Candidates that are named of those skipped for the same reason."""


class BisectionBoot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One boot of a candidate, and its result."""

    # its label
    candidate: str
    fate: ReleaseResult
    # one line, empty for an answer
    why: str
    # name of the run's folder, None if there was no server
    run: str | None
    duration_s: float
    # it ran beside another boot, before it was known to be needed
    ahead: bool = False

    @property
    def tested(self) -> bool:
        """Return False if trouble of the host spoiled the boot: a resumed search repeats it."""
        return self.fate is not ReleaseResult.INFRA

    @property
    def side(self) -> Side:
        """Return the side of the change that the boot speaks for; `skip` if it decides nothing."""
        return _SIDES.get(self.fate, Side.SKIP)


class Bisection(SearchRecord, frozen=True, kw_only=True):
    """Record of a bisection over releases or commits: its candidates and its boots."""

    verb: ClassVar[str] = "bisect"
    file: ClassVar[str] = "bisection"
    fixed: ClassVar[tuple[str, ...]] = ("candidates", "packages", "script")

    arm: str
    expected: Expected
    # the oldest candidate is bad
    find_fix: bool
    # oldest first
    candidates: tuple[Candidate, ...]
    # chance that a bad candidate dies in one boot
    rate: float
    confidence: float = 0.95
    # commits between the candidates that change nothing that is run
    left_out: int = 0
    # the command that answered instead of a server
    script: str | None = None
    boots: tuple[BisectionBoot, ...] = msgspec.field(default=(), name="steps")

    @property
    def from_good(self) -> tuple[Candidate, ...]:
        """Return the candidates as the plan numbers them, from the good end to the bad end."""
        return self.candidates[::-1] if self.find_fix else self.candidates

    @property
    def plan(self) -> BisectionPlan:
        """Return the plan after the boots so far."""
        place = {candidate.label: number for number, candidate in enumerate(self.from_good)}
        results = (BootResult(place[boot.candidate], boot.side) for boot in self.boots)
        return BisectionPlan(size=len(place), rate=self.rate, confidence=self.confidence).after(
            *results
        )

    @property
    def exit_status(self) -> int:
        """Return 0 for an answer, 1 for a surprise, 2 if undecided."""
        known = self.plan.answer()
        if known.state.wrong_end:
            # An end that could not be tried contradicts nothing.
            return 1 if self.was_tested(self.wrong_end(known.state)) else 2
        return 1 if known.good_again else known.state.exit_status

    def boots_of(self, label: str) -> list[BisectionBoot]:
        """Return the boots of the candidate with this label."""
        return [boot for boot in self.boots if boot.candidate == label]

    def was_tested(self, label: str) -> bool:
        """Return True if a boot of this candidate was good or bad, not skipped."""
        return any(boot.side is not Side.SKIP for boot in self.boots_of(label))

    def wrong_end(self, state: SearchState) -> str:
        """Return the label of the end that is not as named. state: a wrong end."""
        return self.from_good[0 if state is SearchState.GOOD_END_WRONG else -1].label

    def candidate(self, place: int) -> Candidate:
        """Return the candidate that the plan calls `place`."""
        return self.from_good[place]

    def answers(self, known: ChangePoints) -> list[str]:
        """Return the labels that may be the first bad one, or the first fixed one, oldest first."""
        points = (point - self.find_fix for point in known.left)
        labels = [
            self.from_good[point].label for point in points if 0 <= point < len(self.candidates)
        ]
        return labels[::-1] if self.find_fix else labels

    def derived(self) -> dict[str, Any]:
        """Return what bisection.json has beside the fields, such as the answer and what is left."""
        known = self.plan.answer()
        left = self.answers(known)
        return {
            "state": known.state,
            "answer": left[0] if known.state is SearchState.FOUND else None,
            "left": left,
            "probability": round(known.probability, 6),
            "good_again": [self.from_good[number].label for number in known.good_again],
        }

    # ── sentences ─────────────────────────────────────────────────────────────────────────────────

    def untried(self, known: ChangePoints) -> list[str]:
        """Return which candidates around the change were skipped, one text for each reason."""
        gap = {candidate.label for candidate in self.from_good[known.left[0] : known.left[-1]]}
        alike: dict[tuple[str, str], list[str]] = {}
        for boot in self.boots:
            if boot.candidate in gap and boot.side is Side.SKIP:
                alike.setdefault((boot.fate, boot.why), []).append(boot.candidate)
        return [
            f"{', '.join(limited(labels, _MOST_ALIKE))} {fate}" + (f" ({why})" if why else "")
            for (fate, why), labels in alike.items()
        ]


_INSTALL = 5.0
"""Cost of a release that is not in the cache, in boots of a cached one.

An install takes two to four minutes, a boot half a minute.
"""


class BisectionSearch(BootSearch[Bisection, Candidate]):
    """Search of one change among candidates. On a cluster with room it boots several at once."""

    def sources(self) -> Sequence[Source | None]:
        """Return the first candidate's source: all commits are of the same checkout."""
        return [self.record.candidates[0].vllm]

    def next(self) -> Sequence[Candidate]:
        """Return the candidates to boot next, several at once on a cluster with room.

        `boot` marks all but the first as booted ahead.
        """
        most = self.job.elsewhere.room(self.job) if self.job.elsewhere else 1
        if self.most_boots is not None:
            most = min(most, max(1, self.most_boots - len(self.record.boots)))
        self._round = [
            self.record.candidate(place)
            for place in self.record.plan.ahead(most, self._relative_cost)
        ]
        return self._round

    def _relative_cost(self, place: int) -> float:
        """Return what a boot of a candidate costs: 1.0, or 5.0 if its release must be installed."""
        facts, source = self.job.choice.kind.facts, self.record.candidate(place).vllm
        source = source.base or source
        # A commit is laid out in seconds.
        installs = source.release and facts.runs_vllm and not facts.container
        return _INSTALL if installs and ReleaseCache().get(source) is None else 1.0

    def describe(self, item: Candidate, number: int) -> str:
        """Return the progress line of a boot that begins."""
        first = len(self.record.boots) + 1
        left = f" (about {self.record.plan.boots_left()} left)"
        return f"boot {number}: {item.label}{left if number == first else f', beside boot {first}'}"

    def answer_after(self, boot: BisectionBoot, *, several: bool) -> str:
        """Return the candidate's side of the change, and the answer so far."""
        label = f"{boot.candidate}: " if several else ""
        return f"{label}{boot.side}: {self.record.readings[0]}"

    def boot(self, item: Candidate) -> tuple[BisectionBoot | None, str | None]:
        """Boot a candidate; return its boot and None, or None and the signal that interrupted it.

        Raises `UsageError` if the first boot does; later ones count as skips.
        """
        began = time.monotonic()
        try:
            row, interrupted = run_release(self, item.vllm)
        except UsageError as error:
            if not self.record.boots:
                raise
            row, interrupted = row_of_error(self, item.vllm, error), None
        if interrupted:
            return None, interrupted
        (arm,) = (arm for arm in row.arms if arm.name == self.record.arm)
        boot = self._finished(item, arm.fate, row.why, began)
        why = row.why if boot.side is Side.SKIP else ""
        return replace(boot, run=row.run, why=why, ahead=item is not self._round[0]), None

    def _finished(
        self, item: Candidate, fate: ReleaseResult, why: str, began: float
    ) -> BisectionBoot:
        """Return the record of a boot that ends now. began: its start on the monotonic clock."""
        took = round(time.monotonic() - began, 1)
        return BisectionBoot(candidate=item.label, fate=fate, why=why, run=None, duration_s=took)


class ScriptSearch(BisectionSearch):
    """A bisection that asks a command of the user instead of a server."""

    def __init__(self, job: Job, record: Bisection, script: str) -> None:
        super().__init__(job, record)
        self._script = script
        self.record = replace(self.record, script=self.redactor.command(script))

    def describe(self, item: Candidate, number: int) -> str:
        """Return the progress line of a call of the script."""
        return super().describe(item, number).replace("boot", "run")

    def boot(self, item: Candidate) -> tuple[BisectionBoot | None, str | None]:
        """Install a candidate and call the script; return its result and None.

        Return None and the reason if the search must stop: an exit status that means nothing.
        """
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
    """Run a shell command and return its exit status; its processes end with it.

    Its output goes to the standard error.
    """
    process = subprocess.Popen(
        script, shell=True, env=environment, stdout=2, start_new_session=True
    )
    try:
        return process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
