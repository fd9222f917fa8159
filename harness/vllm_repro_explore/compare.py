"""Comparison of patches: each case is played as released and with each patch. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_repro.report.format import columns
from vllm_repro_explore.case import Case
from vllm_repro_explore.finding import PlayResult

__all__ = ["Comparison", "PatchTally", "Play", "compare"]

Play = Callable[[Case], PlayResult]


@dataclass(kw_only=True)
class PatchTally:
    """Counts of one patch.

    name: as the user named it. fixed, still, newly: cases. other: those of `still` whose worst
    finding is another one than as released. kinds: for each worst finding as released, its cases
    that are fixed, still the same, or other. still_as, newly_as: cases for each worst finding with
    the patch. first: its first seed. unloaded: patched files that no process of the search
    imported. tested: it imported one.
    """

    name: str
    fixed: int = 0
    still: int = 0
    other: int = 0
    newly: int = 0
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    still_as: Counter[str] = field(default_factory=Counter)
    newly_as: Counter[str] = field(default_factory=Counter)
    unloaded: Sequence[str] = ()
    tested: bool = True
    first: dict[str, dict[str, int]] = field(default_factory=lambda: {"still": {}, "newly": {}})

    @property
    def right(self) -> bool:
        """Return True if no played case fails with this patch."""
        return self.tested and not self.still and not self.newly

    def add(self, seed: int, released: str, patched: str) -> None:
        """Count a case by its worst finding as released and with the patch; empty for none."""
        if released:
            self._add_failing(seed, released, patched)
        elif patched:
            self.newly += 1
            self.newly_as[patched] += 1
            self.first["newly"].setdefault(patched, seed)

    def _add_failing(self, seed: int, released: str, patched: str) -> None:
        """Count a case that fails as released."""
        outcomes = self.kinds.setdefault(released, Counter())
        if not patched:
            self.fixed += 1
            outcomes["fixed"] += 1
            return
        self.still += 1
        self.still_as[patched] += 1
        self.first["still"].setdefault(patched, seed)
        if patched == released:
            outcomes["same"] += 1
        else:
            self.other += 1
            outcomes["other"] += 1

    def as_json(self) -> dict[str, Any]:
        return {
            "patch": self.name,
            "fixed": self.fixed,
            "still_failing": self.still,
            "in_another_way": self.other,
            "newly_failing": self.newly,
            "kinds": {kind: dict(found) for kind, found in self.kinds.items()},
            "still_as": dict(self.still_as),
            "newly_as": dict(self.newly_as),
            "first_seeds": self.first,
            "tested": self.tested,
            "not_loaded": list(self.unloaded),
        }


@dataclass(kw_only=True)
class Comparison:
    """Counts of all patches on the same cases.

    trials: cases played by all. invalid: further cases that vLLM refuses as released. failing:
    cases that fail as released.
    """

    patches: Sequence[PatchTally]
    trials: int = 0
    invalid: int = 0
    failing: int = 0
    failing_as: Counter[str] = field(default_factory=Counter)
    seeds: list[int] = field(default_factory=list)

    @property
    def exit_status(self) -> int:
        """Return 0 if a patch fixes every failing case and breaks none, 1 if none does, 2 if no case fails or no patch was tested."""
        if not any(one.tested for one in self.patches):
            return 2
        if not self.failing:
            return 1 if any(one.newly for one in self.patches) else 2
        return 0 if any(one.right for one in self.patches) else 1

    def as_json(self) -> dict[str, Any]:
        return {
            "seeds": [self.seeds[0], self.seeds[-1]] if self.seeds else [None, None],
            "trials": self.trials,
            "invalid": self.invalid,
            "failing": self.failing,
            "failing_as": dict(self.failing_as),
            "patches": [one.as_json() for one in self.patches],
        }

    def lines(self) -> list[str]:
        """Return the table, and the findings behind each count."""
        quiet = self.trials - self.failing
        table = [("patch", "fixed", "still failing", "newly failing", "reading")]
        for one in self.patches:
            still = f"{one.still} of {self.failing}" + (
                f" ({one.other} in another way)" if one.other else ""
            )
            row = (
                one.name,
                f"{one.fixed} of {self.failing}",
                still,
                f"{one.newly} of {quiet}",
                self._reading(one),
            )
            table.append(row)
        kinds = [
            (
                "fails as released with",
                "cases",
                *(f"fixed by {Path(one.name).name}" for one in self.patches),
            )
        ]
        for kind, count in self.failing_as.most_common():
            kinds.append(
                (kind, f"{count}", *(f"{one.kinds[kind]['fixed']}" for one in self.patches))
            )
        text = [f"as released: {self.failing} of {self.trials} cases fail", ""]
        text += columns(table, [40, 12, 32, 14, 80])
        if self.failing:
            text += ["", *columns(kinds, [100, 5, *[40] * len(self.patches)])]
        for one in self.patches:
            if one.unloaded:
                text += ["", f"{one.name}: the search does not load {', '.join(one.unloaded)}"]
            for words, found in (("still", one.still_as), ("newly", one.newly_as)):
                if found:
                    text += ["", f"{one.name} {words} fails:"]
                    text += [
                        f"  {count} {name} (first seed {one.first[words][name]})"
                        for name, count in found.most_common()
                    ]
        return text

    def _reading(self, one: PatchTally) -> str:
        if not one.tested:
            return "not tested: the search does not load its files"
        if not self.failing and not one.newly:
            return "nothing to tell: no case fails as released"
        if one.right:
            return "fixes every failing case and breaks none"
        whole = sum(not found["same"] and not found["other"] for found in one.kinds.values())
        if one.fixed:
            text = f"fixes {whole} of {len(one.kinds)} kinds of failure"
        elif one.other:
            text = "fixes no case, and hides some: they fail in another way"
        else:
            text = "fixes no case"
        return text + ("; breaks cases" if one.newly else "")


def compare(
    cases: Iterable[tuple[int, Case]],
    released: Play,
    patched: Mapping[str, Play],
    *,
    go_on: Callable[[], bool],
    progress: Callable[[Comparison], None],
    comparison: Comparison,
) -> None:
    """Play each case as released and with each patch, and add it to `comparison` when all were played."""
    for seed, case in cases:
        if not go_on():
            break
        before = released(case)
        if before.invalid:
            comparison.invalid += 1
            continue
        after = {name: play(case) for name, play in patched.items()}
        worst = _worst(before)
        comparison.trials += 1
        comparison.seeds.append(seed)
        if worst:
            comparison.failing += 1
            comparison.failing_as[worst] += 1
        for one in comparison.patches:
            one.add(seed, worst, _worst(after[one.name]))
        progress(comparison)


def _worst(outcome: PlayResult) -> str:
    """Return the worst finding as text.

    A start that is refused only with a patch is a failure, too.
    """
    if outcome.invalid:
        return "refused at start"
    return str(outcome.worst or "")
