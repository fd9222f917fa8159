"""Record of a reduction of a reported command."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import msgspec
from msgspec.structs import replace

from vllm_repro.verdict.outcome import Outcome
from vllm_repro_search.minimize.plan import Attempt, MinimizationPlan
from vllm_repro_search.plan import SearchState
from vllm_repro_search.record import ReleaseSearchRecord

__all__ = ["Minimization", "MinimizationBoot", "Unit"]


@dataclass(frozen=True)
class Unit:
    """A part of the command or workload that may be removed."""

    kind: Literal["request", "pause", "flag", "variable"]
    # of a flag or variable
    name: str
    # as on the command line, or in words without a name
    text: str
    # the same as the servers got it, if the lab's value differs
    booted: str = ""


class MinimizationBoot(msgspec.Struct, frozen=True, kw_only=True):
    """One boot."""

    # see `Attempt`
    units: tuple[int, ...]
    unused: tuple[int, ...]
    outcome: Outcome
    # of a crash
    phase: str | None
    why: str
    # name of the run's folder
    run: str
    duration_s: float

    @property
    def tested(self) -> bool:
        return self.outcome not in (Outcome.INFRA, Outcome.CANCELLED)

    @property
    def attempt(self) -> Attempt:
        refused = self.outcome in (Outcome.BOOT_FAILED, Outcome.UNSUPPORTED)
        return Attempt(self.units, self.outcome is Outcome.CRASH, refused, self.unused)

    @property
    def text(self) -> str:
        return f"{'vLLM does not start' if self.attempt.refused else self.outcome}: {self.why}"


class Minimization(ReleaseSearchRecord, frozen=True, kw_only=True):
    """A reduction of a command and its workload."""

    verb: ClassVar[str] = "minimize"
    file: ClassVar[str] = "minimize"
    fixed: ClassVar[tuple[str, ...]] = ("units", "untried")

    # requests and pauses first
    units: tuple[Unit, ...]
    # flags and variables of the report that this kind of server sets or removes itself
    untried: tuple[str, ...]
    # the reported command without its units
    rest: str
    boots: tuple[MinimizationBoot, ...] = ()

    @property
    def plan(self) -> MinimizationPlan:
        requests = sum(not unit.name for unit in self.units)
        attempts = tuple(boot.attempt for boot in self.kept())
        return MinimizationPlan(
            requests=requests, others=len(self.units) - requests, attempts=attempts
        )

    @property
    def exit_status(self) -> int:
        """Return 1 if the reported command does not crash."""
        return {SearchState.FOUND: 0, SearchState.QUIET: 1}.get(self.plan.answer().state, 2)

    @property
    def smallest(self) -> list[Unit]:
        """Return the units of the smallest crashing set by now."""
        return [self.units[unit] for unit in self.plan.kept or ()]

    @property
    def smallest_command(self) -> str:
        """Return the reported command with what is left, for a POSIX shell."""
        variables = [unit.text for unit in self.smallest if unit.kind == "variable"]
        flags = [f"  {unit.text}" for unit in self.smallest if unit.kind == "flag"]
        return " \\\n".join([*variables, self.rest, *flags])

    @property
    def command(self) -> str:
        return "" if self.plan.kept is None else self.smallest_command

    def answered(self) -> list[bool]:
        return [boot.tested for boot in self.boots]

    def removals(self) -> list[tuple[str, MinimizationBoot]]:
        """Return the text of each unit that is left, and the boot without it, if there was one."""
        kept = self.plan.kept or ()
        smaller = {tuple(other for other in kept if other != unit): unit for unit in kept}
        boots = [boot for boot in self.kept() if boot.units in smaller]
        return [(self.units[smaller[boot.units]].text, boot) for boot in boots]

    def without(self, units: Sequence[int], boots: Sequence[MinimizationBoot]) -> str:
        """Return what a boot with `units` leaves out of the set after `boots`.

        Empty for the first boot.
        """
        left = replace(self, boots=tuple(boots)).plan.kept or ()
        return "; ".join(self.units[unit].text for unit in left if unit not in units)

    def derived(self) -> dict[str, Any]:
        state = self.plan.answer().state
        return {
            "state": state,
            "answer": [unit.text for unit in self.smallest] if state is SearchState.FOUND else None,
            "command": self.smallest_command,
            "removals": {text: boot.text for text, boot in self.removals()},
        }

    def counts(self) -> list[tuple[str, int, int]]:
        """Return how many units of each kind are left, of how many; requests come last."""
        kinds = dict.fromkeys(
            unit.kind for unit in sorted(self.units, key=lambda unit: not unit.name)
        )
        left = Counter(unit.kind for unit in self.smallest)
        whole = Counter(unit.kind for unit in self.units)
        return [(kind, left[kind], whole[kind]) for kind in kinds]
