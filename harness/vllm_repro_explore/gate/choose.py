"""Choice of the next case: where the changed statements run, and near cases that reach them. Pure.

A start (a mix, or the server of a scenario) is drawn by how often its cases run changed
statements a second. Rarely reached statements count more. A part of the cases are variations of
earlier ones that reached such a statement, or that ended or failed newly.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from random import Random

from vllm_repro_explore.case import Case
from vllm_repro_explore.gate.judge import Drawn
from vllm_repro_explore.gate.vary import vary

_NEAR = 0.4
"""Share of cases that vary an earlier one."""
_ANY = 0.15
"""Share of the other cases whose start is drawn without preference."""
_ROUNDS = 2
"""Cases of each start before a preference."""
_KEPT = 6
"""Cases that are kept for each statement and start."""


@dataclass(kw_only=True)
class Start:
    """A source of cases, such as a mix, with what its cases reached."""

    name: str
    draw: Callable[[int], Case]
    # expected share of its cases that run a changed function
    prior: float = 0.0
    # of its last case
    seed: int = 0
    # cases that were played, without variations, and the time that they took
    trials: int = 0
    seconds: float = 0.0
    # cases in which each statement ran
    reach: Counter[int] = field(default_factory=Counter)

    def next(self) -> Drawn:
        """Advance the seed by one, and return its case."""
        self.seed += 1
        return Drawn(case=self.draw(self.seed), origin=self.name, seed=self.seed)


class Chooser:
    """Source of the cases of a gate. first_seed: of each start; sets their `seed`."""

    def __init__(self, starts: Sequence[Start], first_seed: int = 1) -> None:
        self._starts = {start.name: start for start in starts}
        for start in starts:
            start.seed = first_seed - 1
        self._rng = Random(first_seed)
        ordered = sorted(starts, key=lambda start: -start.prior)
        self._waiting = [start for _ in range(_ROUNDS) for start in ordered]
        self._total: Counter[int] = Counter()
        # cases that reached a statement, by start
        self._near: dict[int, dict[str, list[Drawn]]] = defaultdict(lambda: defaultdict(list))
        self._hot: list[Drawn] = []

    @property
    def first_rounds(self) -> bool:
        """Return True until `choose` has returned two cases of each start."""
        return bool(self._waiting)

    def choose(self) -> Drawn:
        """Return the next case: in the first rounds two of each start, then drawn by preference."""
        rng = self._rng
        if self._waiting:
            return self._waiting.pop(0).next()
        if (self._near or self._hot) and rng.random() < _NEAR:
            near = rng.choice(self._hot) if self._hot and rng.random() < 0.5 else self._rare()
            if near is not None:
                case = vary(near.case, rng, far=True)
                return Drawn(case=case, origin=near.origin, seed=case.seed, varied=True)
        starts = list(self._starts.values())
        if not self._total or rng.random() < _ANY:
            return rng.choice(starts).next()
        return rng.choices(starts, weights=[self._worth(start) for start in starts])[0].next()

    def note(self, drawn: Drawn, reached: Mapping[int, int], seconds: float, *, hot: bool) -> None:
        """Add what a case reached, so that `choose` can vary it.

        reached: runs of each changed statement. hot: a failure ended in it, or it fails newly.
        """
        start = self._starts[drawn.origin]
        if not drawn.varied:
            start.trials += 1
            start.seconds += seconds
            start.reach.update(reached.keys())
        self._total.update(reached.keys())
        for statement in reached:
            kept = self._near[statement][drawn.origin]
            if len(kept) < _KEPT:
                kept.append(drawn)
            elif self._rng.random() < _KEPT / self._total[statement]:
                kept[self._rng.randrange(_KEPT)] = drawn
        if hot:
            self._hot = [*self._hot[-4 * _KEPT :], drawn]

    def _rare(self) -> Drawn | None:
        """Return a case that reached a statement, rarely reached ones more often.

        Each start that reaches it has the same chance. Return None if no case reached one.
        """
        if not self._near:
            return None
        statements = list(self._near)
        weights = [1 / self._total[statement] for statement in statements]
        near = self._near[self._rng.choices(statements, weights)[0]]
        return self._rng.choice(near[self._rng.choice(list(near))])

    def _worth(self, start: Start) -> float:
        """Return the weight of this start, by how much a second of its cases reaches; never 0.

        The root keeps one start from having all the time: what a fault needs beyond the statement
        may be in another.
        """
        if not start.trials:
            return 0.01
        gain: float = sum(
            count / start.trials / sqrt(1 + self._total[statement])
            for statement, count in start.reach.items()
        )
        return sqrt(gain / max(start.seconds / start.trials, 0.01)) + 1e-3
