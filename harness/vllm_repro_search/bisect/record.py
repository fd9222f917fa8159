"""Record of a bisection: its fields, its answer in one or two sentences, and its tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from vllm_repro.releases.sources import Source
from vllm_repro.report.format import limited
from vllm_repro.verdict.verdict import Expected
from vllm_repro_search.bisect.plan import BisectionPlan, BootResult, ChangePoints, Side
from vllm_repro_search.plan import SearchState
from vllm_repro_search.record import SearchRecord
from vllm_repro_search.versions.record import ReleaseResult

__all__ = ["Bisection", "BisectionBoot", "Candidate"]

_SIDES = {
    ReleaseResult.LIVES: Side.GOOD,
    ReleaseResult.DIES: Side.BAD,
    ReleaseResult.SOMETIMES: Side.BAD,
}
"""Of a boot. Any other result is a skip."""

_MOST_ALIKE = 3


@dataclass(frozen=True)
class Candidate:
    """One vLLM to try."""

    label: str
    # what `--vllm` takes
    source: str
    # of a commit
    title: str = ""
    # of the author, as in 2026-05-01
    date: str = ""

    @property
    def vllm(self) -> Source:
        checkout, _, commit = self.source.rpartition("@")
        return (
            Source(folder=Path(checkout), commit=commit)
            if checkout
            else Source(release=self.source)
        )


class BisectionBoot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One boot."""

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
        return self.fate is not ReleaseResult.INFRA

    @property
    def side(self) -> Side:
        return _SIDES.get(self.fate, Side.SKIP)


class Bisection(SearchRecord, frozen=True, kw_only=True):
    """A bisection over releases or commits."""

    verb: ClassVar[str] = "bisect"
    file: ClassVar[str] = "bisection"
    fixed: ClassVar[tuple[str, ...]] = ("candidates", "script")

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
        place = {candidate.label: number for number, candidate in enumerate(self.from_good)}
        results = (BootResult(place[boot.candidate], boot.side) for boot in self.boots)
        return BisectionPlan(size=len(place), rate=self.rate, confidence=self.confidence).after(
            *results
        )

    @property
    def exit_status(self) -> int:
        known = self.plan.answer()
        if known.state.wrong_end:
            # An end that could not be tried contradicts nothing.
            return 1 if self.answered_of(self.wrong_end(known)) else 2
        if known.good_again:
            return 1
        return 0 if known.state is SearchState.FOUND else 2

    def boots_of(self, label: str) -> list[BisectionBoot]:
        return [boot for boot in self.boots if boot.candidate == label]

    def answered_of(self, label: str) -> bool:
        """Return True if a boot of this candidate gave an answer."""
        return any(boot.side is not Side.SKIP for boot in self.boots_of(label))

    def wrong_end(self, known: ChangePoints) -> str:
        """Return the label of the end that is not as named."""
        return self.from_good[0 if known.state is SearchState.GOOD_END_WRONG else -1].label

    def left(self, known: ChangePoints) -> list[str]:
        """Return the labels that may be the first bad one, or the first fixed one, oldest first."""
        points = (point - self.find_fix for point in known.left)
        labels = [
            self.from_good[point].label for point in points if 0 <= point < len(self.candidates)
        ]
        return labels[::-1] if self.find_fix else labels

    def derived(self) -> dict[str, Any]:
        known = self.plan.answer()
        left = self.left(known)
        return {
            "state": known.state,
            "answer": left[0] if known.state is SearchState.FOUND else None,
            "left": left,
            "probability": round(known.probability, 6),
            "good_again": [self.from_good[number].label for number in known.good_again],
        }

    # ── sentences ─────────────────────────────────────────────────────────────────────────────────

    def untried(self, known: ChangePoints) -> list[str]:
        """Return the skipped candidates among those left, grouped by reason."""
        gap = {candidate.label for candidate in self.from_good[known.left[0] : known.left[-1]]}
        alike: dict[tuple[str, str], list[str]] = {}
        for boot in self.boots:
            if boot.candidate in gap and boot.side is Side.SKIP:
                alike.setdefault((boot.fate, boot.why), []).append(boot.candidate)
        return [
            f"{', '.join(limited(labels, _MOST_ALIKE))} {fate}" + (f" ({why})" if why else "")
            for (fate, why), labels in alike.items()
        ]
