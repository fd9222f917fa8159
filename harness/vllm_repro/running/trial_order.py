"""Order of the trials of a run, and under `--trials auto` the arms to try once more. Pure.

`--trials auto` tries each arm until its claim is decided:

- The arm that dies: once, or `DEATHS` times if other arms are compared with it. After five deaths
  in five trials, four clean trials separate a workaround from luck. Nine trials in all are the
  fewest that can.
- A clean arm: as often as `clean_needed` asks for.
- An arm with another outcome (hung, another death, failed boot, boundary not crossed): once. It
  would do the same again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from vllm_repro.scenario.scenario import Arm
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.statistics import clean_needed
from vllm_repro.verdict.verdict import ArmResult, Expected, Record, is_other, same_release

DEATHS = 5
"""Trials of the arm that dies, if other arms are compared with it."""
MOST = 20  # an hour of boots of three minutes
"""Most trials of one arm. If its claim needs more clean trials than that, none is added."""


@dataclass
class Trials:
    """Outcomes of a run's finished trials, by arm."""

    # of the finished trials, without the repeated ones
    outcomes: dict[str, list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    # trials that look like the bug and do not count as it
    strange: Counter[str] = field(default_factory=Counter)
    # highest number of a trial
    last: Counter[str] = field(default_factory=Counter)
    # arms with an `infra` trial that was repeated
    repeated: set[str] = field(default_factory=set)

    def finish(
        self, arm: str, expected: Expected, outcome: Outcome, during: str, *, crossed: bool
    ) -> None:
        """Count a finished trial, and whether it only looks like the bug.

        Do not count an arm's first `infra` trial: it is repeated. The arguments are those of
        `is_other`.
        """
        if outcome is Outcome.INFRA and arm not in self.repeated:
            self.repeated.add(arm)
            return
        self.outcomes[arm].append(outcome)
        self.strange[arm] += is_other(expected, outcome, during, crossed=crossed)

    def in_turn(self, arms: Sequence[Arm], due: Callable[[], Sequence[str]]) -> Iterator[Arm]:
        """Yield the arms to try: A B in odd rounds, B A in even ones.

        So a machine that slows down or warms up favours no arm. due: called before each round for
        the names of the arms that need another trial; stop if it returns none. The caller records
        each trial with `finish`. In round n an arm gets its trial n, so a resumed run keeps the
        order.
        """
        for n in count(1):
            names = due()
            if not names:
                return
            for arm in arms if n % 2 else reversed(arms):
                if arm.name in names and len(self.outcomes[arm.name]) < n:
                    yield arm


def undecided_arms(
    arms: Sequence[ArmResult],
    record: Record | None = None,
    version: str | None = None,
    *,
    patched: bool = False,
) -> list[str]:
    """Return the names of the arms that have no trial, or that one more trial may decide.

    record: an earlier run on this host in which the bug was seen. The other arguments are those
    of `decide`.
    """
    if record is not None and same_release(record.version, version) is not patched:
        # a fix needs deaths of another release, a patch needs deaths of the same one
        record = None
    dying = next((arm for arm in arms if arm.expected.has_bug and arm.crashed), None)
    compared = any(
        arm.expected is Expected.LIVES and set(arm.outcomes) <= {Outcome.CLEAN} for arm in arms
    )
    return [
        arm.name
        for arm in arms
        if not arm.outcomes or _undecided(arm, dying, record, compared=compared)
    ]


def _undecided(
    arm: ArmResult, dying: ArmResult | None, record: Record | None, *, compared: bool
) -> bool:
    """Return True if one more trial of this arm may decide its claim; see the module for the rule.

    dying: the first arm with the bug that crashed. compared: another arm is expected to live and
    has only clean trials.
    """
    trials = len(arm.outcomes)
    if trials >= MOST or arm.strange or not set(arm.outcomes) <= {arm.expected.sign, Outcome.CLEAN}:
        return False
    if arm.crashed:
        return arm is dying and compared and trials < DEATHS
    if arm.expected is Expected.UNTRIGGERED:
        return False
    if arm.expected is Expected.LIVES:
        if dying is None:
            return False
        # Assume that the dying arm dies in all its remaining trials.
        ahead = max(0, DEATHS - dying.conclusive)
        return _short_of(clean_needed(dying.crashed + ahead, dying.conclusive + ahead), trials)
    if record is None or record.arm != arm.name:
        return trials < (clean_needed(DEATHS, DEATHS) or 0)
    return _short_of(clean_needed(record.crashed, record.boots), trials)


def _short_of(needed: int | None, trials: int) -> bool:
    """Return True if the arm needs more clean trials, and no more than `MOST` in all."""
    return needed is not None and trials < needed <= MOST
