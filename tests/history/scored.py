"""Simulated weeks, and what the history makes of them beside what is true of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, timedelta

from tests.history.simulated import SLOW, Weeks
from vllm_repro.history.life import Life, Step, lives
from vllm_repro.history.nights import night_of
from vllm_repro.history.trend import Call, Direction, Suspect, trends


@dataclass(frozen=True)
class Score:
    """loss: the call of the real loss, None where it was missed. fix: the step that calls the fix, likewise. suspect: the slow host.

    false_*: what was called and is not true.
    """

    weeks: Weeks
    loss: Call | None
    fix: Step | None
    suspect: Suspect | None
    false_calls: tuple[Call, ...]
    false_fixes: tuple[tuple[str, Step], ...]
    false_suspects: tuple[Suspect, ...]

    @property
    def delay(self) -> int | None:
        """Nights from the first slower one to the one that called it: 2 is the least."""
        if self.loss is None or self.weeks.loss is None:
            return None
        return (self.loss.called - self.weeks.night(self.weeks.loss)).days

    @property
    def right(self) -> bool:
        """Whether it called all that is true, and nothing else."""
        weeks = self.weeks
        told = (self.loss is None) is (weeks.loss is None) and (self.fix is None) is (weeks.fix is None)
        named = (self.suspect is None) is (weeks.slow is None)
        return told and named and not self.false_calls and not self.false_fixes and not self.false_suspects


def score(weeks: Weeks) -> Score:
    rows = [(night_of(row.started_at, UTC), row) for row in weeks.rows()]
    found = trends(rows)
    losses = [call for call in found.calls if _is_loss(weeks, call)]
    slow = [one for one in found.suspects if _is_slow(weeks, one)]
    steps = [(life.scenario, step) for life in lives(rows) for step in life.steps if _tells_a_fix(step)]
    fixes = [step for scenario, step in steps if _is_fix(weeks, scenario, step)]
    return Score(
        weeks,
        losses[0] if losses else None,
        fixes[0] if fixes else None,
        slow[0] if slow else None,
        tuple(call for call in found.calls if call not in losses[:1]),
        tuple((scenario, step) for scenario, step in steps if step not in fixes[:1]),
        tuple(one for one in found.suspects if one not in slow),
    )


def _is_loss(weeks: Weeks, call: Call) -> bool:
    if weeks.loss is None or (call.scenario, call.arm) != weeks.lossy or call.direction is not Direction.SLOWER:
        return False
    # A night or two before it may have been slow by chance, and begin the row.
    return call.called >= weeks.night(weeks.loss) and call.since >= weeks.night(weeks.loss) - timedelta(days=3)


def _is_slow(weeks: Weeks, suspect: Suspect) -> bool:
    if weeks.slow is None or suspect.host != SLOW:
        return False
    return suspect.direction is Direction.SLOWER and suspect.called >= weeks.night(weeks.slow[0])


def _tells_a_fix(step: Step) -> bool:
    """The steps by which a bug is said to be gone or back; that a candidate came or went is a lead and no call."""
    return step.life is Life.REGRESSED or (step.life.good and not step.was.good)


def _is_fix(weeks: Weeks, scenario: str, step: Step) -> bool:
    return weeks.fix is not None and scenario == weeks.fixed and step.life.good and step.night >= weeks.night(weeks.fix)
