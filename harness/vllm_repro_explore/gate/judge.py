"""Judgement of a change from cases that were played on both trees. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import comb
from random import Random
from statistics import median

from vllm_repro_explore.case import Case, true_texts
from vllm_repro_explore.finding import Finding, FindingKind, PlayResult

Key = tuple[FindingKind, str, str]
"""Identity of a finding: kind, site and, unless it is an exception, parts of its case's setup."""


def key_of(finding: Finding, case: Case) -> Key:
    """Return kind and site of a finding and, unless it is a death, what its case's server is."""
    setup = case.setup
    if finding.kind is FindingKind.DEATH:
        return finding.kind, finding.site, ""
    server = {
        setup.connector or "no connector": True,
        "lazy": setup.lazy and setup.connector,
        "asynchronous": setup.asynchronous,
        "second runner": setup.runner == 2,
    }
    return finding.kind, finding.site, ", ".join(true_texts(server))


_ENDED = 10
_APART = 3
"""Cases of a known failure that must end, and of them unvaried ones, before a change fixes it.

By another order of valid choices a case ends as often as one comes up: all of 10 would by 1 in
1000. Variations lie near a few cases.
"""
_HIDDEN = 5
"""Cases in which a known failure becomes another one, before a change is said to hide it."""
_SURE = 0.001
"""Chance that as many cases fail newly, if as many as those end by chance."""
_SLOWER = 1.10


class Answer(StrEnum):
    """Answer of a gate."""

    FIXES = "fixes"
    BREAKS = "breaks"
    NO_DIFFERENCE = "no difference seen"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A case of a gate and where it comes from."""

    case: Case
    # mix or scenario
    origin: str
    # number of the case, a seed; of a varied case that of the gate's own random numbers
    seed: int
    varied: bool = False

    def __str__(self) -> str:
        return f"{'near a case' if self.varied else f'case {self.seed}'} of {self.origin}"


@dataclass(kw_only=True)
class Pairs:
    """Counts of one finding over the cases that both trees played."""

    # it fails as released, and passes with the change
    ended: int = 0
    # it fails with both
    stays: int = 0
    # it fails as released, and in another way with the change
    other: int = 0
    # it passes as released, and fails with the change
    new: int = 0
    # of `new`, of `ended`, and of all that fail as released, the cases that are no variations of
    # earlier ones
    fresh_new: int = 0
    fresh_ended: int = 0
    fresh_base: int = 0
    # some of the cases that end, and of those that fail newly
    ended_cases: list[Drawn] = field(default_factory=list)
    new_cases: list[Drawn] = field(default_factory=list)

    @property
    def fixed(self) -> bool:
        """Return True if it ends in 10 or more cases, and none keeps it, changes it or gets it."""
        enough = self.ended >= _ENDED and self.fresh_base >= _APART
        return enough and not (self.stays or self.other or self.new)

    @property
    def worse(self) -> bool:
        """Return True if far more cases fail newly than end, or than fail as released.

        Another order of valid choices moves a known failure to other cases, and may make it
        somewhat more frequent. Variations do not count where cases of the base are compared: they
        lie near a few cases. Nor do they alone: those near a case that was chosen since it fails
        newly fail newly, too.
        """
        apart = self.fresh_new >= _APART and self.fresh_new > 2 * self.fresh_ended
        if apart and _chance(self.new, self.ended, 2) < _SURE:
            return True
        few = self.fresh_new <= 2 * self.fresh_base
        return not few and _chance(self.fresh_new, self.fresh_base) < _SURE

    @property
    def better(self) -> bool:
        """Return True if more cases end than can be by another order of valid choices."""
        return _chance(self.ended, self.new) < _SURE


def _chance(more: int, less: int, odds: int = 1) -> float:
    """Return the chance of at least `more` of `more + less` coins, each heads at `odds` to 1."""
    trials = more + less
    ways: int = sum(comb(trials, count) * odds**count for count in range(more, trials + 1))
    whole: int = (1 + odds) ** trials
    return ways / whole


_KEPT = 40
"""Most cases kept in each list of `Pairs`."""


@dataclass
class Score:
    """Counts of a gate over the cases so far."""

    # cases that both trees played
    trials: int = 0
    # further cases, refused by vLLM as released
    invalid: int = 0
    pairs: dict[Key, Pairs] = field(default_factory=dict)
    # findings of the base in any case
    in_base: set[Key] = field(default_factory=set)
    # for each changed statement: runs, and cases with one, of the base and of the changed tree
    runs_before: Counter[int] = field(default_factory=Counter)
    runs_after: Counter[int] = field(default_factory=Counter)
    cases_after: Counter[int] = field(default_factory=Counter)
    # cases by origin in which a changed statement ran
    origins: Counter[str] = field(default_factory=Counter)
    # sum of `origins`
    reached: int = 0
    # per case without a finding: steps and microseconds of the base, then of the changed tree
    costs: list[tuple[int, float, int, float]] = field(default_factory=list)
    # per case without a finding: preempted, tokens from the cache, steps; base and changed
    choices: list[tuple[tuple[int, int, int], tuple[int, int, int]]] = field(default_factory=list)

    def count(self, drawn: Drawn, base: PlayResult, changed: PlayResult) -> Finding | None:
        """Add a case; return its worst finding with the change if the base passes it, else None."""
        self.trials += 1
        self.runs_before.update(base.reached)
        self.runs_after.update(changed.reached)
        self.cases_after.update(changed.reached.keys())
        if changed.reached or base.reached:
            self.reached += 1
            self.origins[drawn.origin] += 1
        worst, now = base.worst, worst_of(changed)
        self.in_base |= {key_of(finding, drawn.case) for finding in base.findings}
        if worst is None and now is None:
            if base.steps and changed.steps:
                self.costs.append((base.steps, base.vllm_us, changed.steps, changed.vllm_us))
                self.choices.append((_choices(base), _choices(changed)))
            return None
        if worst is None and now is not None:
            pairs = self.pairs.setdefault(key_of(now, drawn.case), Pairs())
            pairs.new += 1
            pairs.fresh_new += not drawn.varied
            pairs.new_cases += [drawn][: _KEPT - len(pairs.new_cases)]
            return now
        assert worst is not None
        pairs = self.pairs.setdefault(key_of(worst, drawn.case), Pairs())
        pairs.fresh_base += not drawn.varied
        if now is None:
            pairs.ended += 1
            pairs.fresh_ended += not drawn.varied
            pairs.ended_cases += [drawn][: _KEPT - len(pairs.ended_cases)]
        elif now == worst:
            pairs.stays += 1
        else:
            pairs.other += 1
        return None

    @property
    def _come_up(self) -> set[tuple[FindingKind, str]]:
        """Return kind and site of the findings that a case shows with the change alone."""
        return {key[:2] for key, pairs in self.pairs.items() if pairs.new}

    @property
    def fixed(self) -> list[Key]:
        """Return the findings that end in 10 or more cases, and in none stay, change or come up.

        Nor may one come up on another server: it would have moved there.
        """
        moved = self._come_up
        return [key for key, pairs in self.pairs.items() if pairs.fixed and key[:2] not in moved]

    @property
    def partly(self) -> list[Key]:
        """Return the failures that the change ends in a part of the cases alone, or hides.

        A hidden one becomes another failure, or comes up on another server.
        """
        moved = self._come_up  # kind and site of each, on any server
        return [
            key
            for key, pairs in self.pairs.items()
            if (pairs.better and (pairs.stays or pairs.other or key[:2] in moved))
            or (pairs.other >= _HIDDEN and not pairs.stays)
        ]

    def differences(self) -> list[str]:
        """Return in words which choices of the scheduler differ over the cases that pass.

        Differences that chance explains are left out.
        """
        names = ("preemptions", "prompt tokens from the cache", "steps")
        texts = []
        for place, name in enumerate(names):
            pairs = [(before[place], after[place]) for before, after in self.choices]
            less = sum(after < before for before, after in pairs)
            more = sum(after > before for before, after in pairs)
            was, now = sum(before for before, _ in pairs), sum(after for _, after in pairs)
            if was != now and min(_chance(less, more), _chance(more, less)) < _SURE:
                texts.append(
                    f"{now:,} {name} in place of {was:,}: fewer in {less}, more in {more} of"
                    f" {len(pairs)} cases"
                )
        return texts

    def cost(self) -> Cost | None:
        """Return the CPU time of vLLM's own code a step; None with fewer than 20 passing cases."""
        return cost_of(self.costs) if len(self.costs) >= 20 else None


def worst_of(result: PlayResult) -> Finding | None:
    """Return the worst finding of the changed tree; None if it passes.

    A start that vLLM refuses counts as a death.
    """
    if result.invalid:
        return Finding(
            kind=FindingKind.DEATH,
            site=f"refused at start: {result.invalid.splitlines()[0][:120]}",
            detail=result.invalid,
        )
    return result.worst


def _choices(result: PlayResult) -> tuple[int, int, int]:
    """Return preemptions, prompt tokens from the cache and steps of a case.

    Another order of valid choices may change them.
    """
    return result.counts.get("preempted", 0), result.cached_tokens, result.steps


@dataclass(frozen=True, kw_only=True)
class Cost:
    """CPU time of vLLM's own code in a step of the engine."""

    # microseconds a step
    before: float
    after: float
    # 95 % interval of the ratio
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """Return the time with the change as a share of that without."""
        return self.after / self.before

    @property
    def slower(self) -> bool:
        """Return True if even the low end of the interval is more than 10 % slower."""
        return self.low > _SLOWER


def cost_of(costs: Sequence[tuple[int, float, int, float]]) -> Cost:
    """Return the cost from (steps, microseconds) of both trees in each case.

    The ratio is the median over the cases, as single cases may be disturbed; its interval is that
    of 300 resamples.
    """
    rng = Random(1)
    ratios = sorted(
        (after_us / after_steps) / (before_us / before_steps)
        for before_steps, before_us, after_steps, after_us in costs
        if before_us > 0 and after_us > 0
    )
    medians = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(300))
    before = median(before_us / before_steps for before_steps, before_us, _, _ in costs)
    return Cost(
        before=before,
        after=before * median(ratios),
        low=medians[7],
        high=medians[-8],
    )
