"""Comparison of patches: each case is played as released and with each patch. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_repro.report.document import plain_text
from vllm_repro.report.format import columns
from vllm_repro_explore.case import Case
from vllm_repro_explore.finding import PlayResult

Play = Callable[[Case], PlayResult]


@dataclass(kw_only=True)
class PatchTally:
    """Counts of one patch: cases that it fixes, that still fail with it, and that newly fail."""

    # as the user named it
    name: str
    fixed: int = 0
    still: int = 0
    # those of `still` whose worst finding is another one than as released
    in_another_way: int = 0
    newly: int = 0
    # for each worst finding as released, how many cases are "fixed", "same" or "other"
    kinds: dict[str, Counter[str]] = field(default_factory=dict)
    # cases of `still` by their worst finding with the patch, and those of `newly`
    still_as: Counter[str] = field(default_factory=Counter)
    newly_as: Counter[str] = field(default_factory=Counter)
    # patched files that no process of the search imported
    unloaded: Sequence[str] = ()
    # a process imported at least one patched file
    tested: bool = True
    # first seed of each worst finding with the patch, for `still` and for `newly`
    first: dict[str, dict[str, int]] = field(default_factory=lambda: {"still": {}, "newly": {}})

    @property
    def right(self) -> bool:
        """Return True if the patch was tested and no played case fails with it."""
        return self.tested and not self.still and not self.newly

    def add(self, seed: int, released: str, patched: str) -> None:
        """Count a case by its worst finding as `released` and as `patched`; empty for none."""
        if released:
            outcome = "other" if patched not in ("", released) else "same" if patched else "fixed"
            self.kinds.setdefault(released, Counter())[outcome] += 1
            self.fixed += not patched
            self.still += bool(patched)
            self.in_another_way += outcome == "other"
        if patched:
            self.newly += not released
            (self.still_as if released else self.newly_as)[patched] += 1
            self.first["still" if released else "newly"].setdefault(patched, seed)

    def as_json(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        return {
            "patch": self.name,
            "fixed": self.fixed,
            "still_failing": self.still,
            "in_another_way": self.in_another_way,
            "newly_failing": self.newly,
            "kinds": {kind: dict(outcomes) for kind, outcomes in self.kinds.items()},
            "still_as": dict(self.still_as),
            "newly_as": dict(self.newly_as),
            "first_seeds": self.first,
            "tested": self.tested,
            "not_loaded": list(self.unloaded),
        }


@dataclass(kw_only=True)
class Comparison:
    """Result of `vllm-repro explore --patch`: counts of all patches on the same cases."""

    patches: Sequence[PatchTally]
    # cases played by all
    trials: int = 0
    # further cases that vLLM refuses as released
    invalid: int = 0
    # cases that fail as released
    failing: int = 0
    failing_as: Counter[str] = field(default_factory=Counter)
    seeds: list[int] = field(default_factory=list)

    @property
    def exit_status(self) -> int:
        """Return 0 if a patch fixes every failing case and breaks none, and 1 if none does.

        Return 2 if no patch was tested, or if no case fails as released or newly.
        """
        tested = any(patch.tested for patch in self.patches)
        if not tested or not (self.failing or any(patch.newly for patch in self.patches)):
            return 2
        return 0 if self.failing and any(patch.right for patch in self.patches) else 1

    def as_json(self) -> dict[str, Any]:
        """Return the counts of all cases and of each patch as a JSON object."""
        return {
            "seeds": [self.seeds[0], self.seeds[-1]] if self.seeds else [None, None],
            "trials": self.trials,
            "invalid": self.invalid,
            "failing": self.failing,
            "failing_as": dict(self.failing_as),
            "patches": [patch.as_json() for patch in self.patches],
        }

    def lines(self) -> list[str]:
        """Return the table, a row per patch, and the findings behind each count, as text lines."""
        patches, quiet = self.patches, self.trials - self.failing
        table = [("patch", "fixed", "still failing", "newly failing", "reading")]
        for patch in patches:
            note = f" ({patch.in_another_way} in another way)" if patch.in_another_way else ""
            counts = (f"{patch.fixed} of {self.failing}", f"{patch.still} of {self.failing}{note}")
            table.append((patch.name, *counts, f"{patch.newly} of {quiet}", self._reading(patch)))
        fixed_by = (f"fixed by {Path(patch.name).name}" for patch in patches)
        kinds = [("fails as released with", "cases", *fixed_by)]
        for kind, count in self.failing_as.most_common():
            fixed = (f"{patch.kinds[kind]['fixed']}" for patch in patches)
            kinds.append((kind, f"{count}", *fixed))
        return plain_text(
            "compare.txt",
            Path(__file__).with_name("templates"),
            comparison=self,
            table=columns(table, [40, 12, 32, 14, 80]),
            kinds=columns(kinds, [100, 5, *[40] * len(patches)]),
        ).split("\n")

    def _reading(self, patch: PatchTally) -> str:
        """Return in words what a patch does to the failing cases."""
        if not patch.tested:
            return "not tested: the search does not load its files"
        if not self.failing and not patch.newly:
            return "nothing to tell: no case fails as released"
        if patch.right:
            return "fixes every failing case and breaks none"
        whole = sum(set(outcomes) == {"fixed"} for outcomes in patch.kinds.values())
        text = f"fixes {whole} of {len(patch.kinds)} kinds of failure"
        if not patch.fixed:
            hides = ", and hides some: they fail in another way" if patch.in_another_way else ""
            text = f"fixes no case{hides}"
        return text + ("; breaks cases" if patch.newly else "")


def compare(
    cases: Iterable[tuple[int, Case]],
    released: Play,
    patched: Mapping[str, Play],
    *,
    go_on: Callable[[], bool],
    progress: Callable[[Comparison], None],
    comparison: Comparison,
) -> None:
    """Run each case as released and with each patch, and add the results to `comparison`.

    A case is added once it has run with all patches. If vLLM as released refuses its flags, it
    counts as invalid. released: runs a case without a patch; patched: with each, by its name.
    go_on: asked before each case; False stops. progress: called after each added case.
    """
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
        for patch in comparison.patches:
            patch.add(seed, worst, _worst(after[patch.name]))
        progress(comparison)


def _worst(outcome: PlayResult) -> str:
    """Return the worst finding of a case as text; empty if it did not fail.

    It is `refused at start` if vLLM refused the flags: with a patch alone that is a failure, too.
    """
    return "refused at start" if outcome.invalid else str(outcome.worst or "")
