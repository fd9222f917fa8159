"""Record of a search of the shortest prompt that crashes."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from vllm_repro.verdict.outcome import Outcome
from vllm_repro_search.plan import SearchState
from vllm_repro_search.record import ReleaseSearchRecord
from vllm_repro_search.threshold.plan import PromptResult, PromptSent, ThresholdPlan

__all__ = ["Threshold", "ThresholdBoot"]


class ThresholdBoot(msgspec.Struct, frozen=True, kw_only=True):
    """One boot."""

    # the prompts that gave an answer or a skip, in order
    probes: tuple[PromptSent, ...]
    outcome: Outcome
    why: str
    # name of the run's folder
    run: str
    duration_s: float

    @property
    def tested(self) -> bool:
        return bool(self.probes)


class Threshold(ReleaseSearchRecord, frozen=True, kw_only=True):
    """A search of the shortest crashing prompt among the lengths `low` to `high`, in tokens."""

    verb: ClassVar[str] = "threshold"
    file: ClassVar[str] = "threshold"
    fixed: ClassVar[tuple[str, ...]] = ("low", "high", "guess")

    low: int
    high: int
    # the shortest crashing prompt by the scenario's formula
    guess: int
    boots: tuple[ThresholdBoot, ...] = ()

    @property
    def plan(self) -> ThresholdPlan:
        probes = (probe for boot in self.boots for probe in boot.probes)
        return ThresholdPlan(low=self.low, high=self.high, guess=self.guess).after(*probes)

    def answered(self) -> list[bool]:
        return [
            any(probe.answer is not PromptResult.SKIP for probe in boot.probes)
            for boot in self.boots
        ]

    def derived(self) -> dict[str, Any]:
        known = self.plan.answer()
        return {
            "state": known.state,
            "answer": known.shortest_crash if known.state is SearchState.FOUND else None,
            "shortest_crash": known.shortest_crash,
            "longest_quiet": known.longest_quiet,
        }
