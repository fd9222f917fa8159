"""History of the runs of a folder: state of each bug, its last 14 nights, and changes.

A night is named for its morning and begins at 18:00 the evening before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta, tzinfo
from functools import partial
from typing import NamedTuple

from vllm_repro.report.runs import Run
from vllm_repro.verdict.outcome import Tone
from vllm_repro.verdict.verdict import Verdict
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_nights.bug_state import BugState, bug_state
from vllm_repro_nights.throughput import NightThroughput, throughput

# Most nights in the table.
NIGHTS = 14
_EVENING = timedelta(hours=6)


class Mark(NamedTuple):
    """Mark in the history table for the result of a night."""

    letter: str
    meaning: str
    tone: Tone


# By result, worst first: a night of several runs shows the worst.
MARKS: dict[str, Mark] = {
    Verdict.REGRESSED: Mark("X", "regressed", "bad"),
    Verdict.CHANGED: Mark("C", "failed in another way", "bad"),
    Verdict.REPRODUCES: Mark("R", "reproduces", "warn"),
    Verdict.QUIET: Mark("Q", "quiet: trigger crossed, engine alive", "good"),
    Verdict.FIXED: Mark("F", "fixed, by the verdict of that night's run", "good"),
    "infra": Mark("I", "infra trouble", "dull"),
    "interrupted": Mark("/", "interrupted", "dull"),
    Verdict.INCONCLUSIVE: Mark("?", "undecided", "dull"),
    "not run": Mark("·", "not run", "dull"),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Result of a bug in one night, and the runs behind it."""

    night: date
    # a key of `MARKS`
    result: str = "not run"
    # a run contradicts the declared status
    surprise: bool = False
    # folders of the runs, worst first
    runs: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BugNights:
    """A row of the table: one bug with one kind of evidence."""

    scenario: str
    evidence: str
    state: BugState
    reason: str
    nights: tuple[Cell, ...]
    # a trial tested an engine: else the evidence is only what a boot would have given
    tested: bool

    @property
    def decided(self) -> bool:
        """Return True if a run decided something in these nights or before; else it gets no row."""
        decided = any(MARKS[cell.result].tone != "dull" for cell in self.nights)
        return decided or self.state.verdict is not Verdict.INCONCLUSIVE


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of a bug since the earlier night, such as a new state."""

    # the new state, or "not run"
    kind: str
    # a claim about vLLM: regressed, or fixed as the boots show
    call: bool = False
    scenario: str
    evidence: str
    text: str
    # folder of the run that shows it
    run: str


@dataclass(frozen=True, kw_only=True)
class History:
    """State of each bug over the last nights, what changed, and the throughput."""

    # the last nights with runs, oldest first
    nights: tuple[date, ...]
    # the night that `changes` compare with; None without an earlier one
    since: date | None
    changes: tuple[Change, ...]
    bugs: tuple[BugNights, ...]
    throughput: tuple[NightThroughput, ...]
    # runs of the last night
    last_night: tuple[Run, ...]

    @property
    def simulated(self) -> bool:
        """Return True if every run is a rehearsal; False without runs."""
        return bool(self.bugs) and all(bug.evidence == Evidence.REHEARSAL for bug in self.bugs)


def night_of(started_at: str, zone: tzinfo | None) -> date:
    """Return the night of `2026-11-22T03:45:16Z` in `zone` (None: local time).

    From 18:00 on it is that of the next day.
    """
    local = datetime.fromisoformat(started_at).astimezone(zone).replace(tzinfo=None)
    return (local + _EVENING).date()


def tested(run: Run) -> bool:
    """Return True if a trial of the run tested an engine."""
    return any(trial.outcome.facts.tested for arm in run.arms for trial in arm.trials)


def history(
    runs: Sequence[Run], zone: tzinfo | None, *, last: int = 1, scenarios: Sequence[str] = ()
) -> History:
    """Return the history of `runs`, which are in the order of their start.

    zone: time zone of the nights. last: number of last nights to compare with those before.
    scenarios: keep only these, if any are named.
    """
    dated = [(night_of(run.started_at, zone), run) for run in runs]
    nights = sorted({night for night, _ in dated})[-NIGHTS:]
    since = nights[-last - 1] if len(nights) > last else None
    kept = [pair for pair in dated if not scenarios or pair[1].scenario in scenarios]
    by_bug: dict[tuple[str, str], list[tuple[date, Run]]] = {}
    for night, run in kept:
        by_bug.setdefault((run.scenario, run.evidence), []).append((night, run))
    bugs: list[BugNights] = []
    changes: list[Change] = []
    for key, pairs in sorted(by_bug.items()):
        bugs.append(_bug_nights(*key, pairs, nights))
        if since is not None:
            earlier = [pair for pair in pairs if pair[0] <= since]
            changes += _changes(bugs[-1], bug_state(earlier).verdict, last)
    return History(
        nights=tuple(nights),
        since=since,
        changes=tuple(sorted(changes, key=lambda change: not change.call)),
        bugs=tuple(bugs),
        throughput=tuple(throughput(kept)),
        last_night=tuple(run for night, run in kept if night == nights[-1]),
    )


def _bug_nights(
    scenario: str, evidence: str, pairs: Sequence[tuple[date, Run]], nights: Sequence[date]
) -> BugNights:
    """Return the table's row of a bug: its state, and its result in each night."""
    state = bug_state(pairs)
    return BugNights(
        scenario=scenario,
        evidence=evidence,
        state=state,
        reason=state.reason,
        nights=tuple(_cell(night, [run for day, run in pairs if day == night]) for night in nights),
        tested=any(tested(run) for _, run in pairs),
    )


def _cell(night: date, runs: Sequence[Run]) -> Cell:
    """Return the result of a bug in one night: the worst of its runs."""
    worst_first = sorted(runs, key=lambda run: list(MARKS).index(_result(run)))
    return Cell(
        night=night,
        result=_result(worst_first[0]) if runs else "not run",
        surprise=any(run.surprise for run in runs),
        runs=tuple(run.id for run in worst_first),
    )


def _result(run: Run) -> str:
    """Return the key of a run's mark. Controls and patched arms alone decide nothing."""
    failed_otherwise = run.verdict is Verdict.CHANGED and bool(run.leading)
    if failed_otherwise or run.died is not None or run.quiet:
        return run.verdict
    undecided = "infra" if run.infra else Verdict.INCONCLUSIVE
    return "interrupted" if run.interrupted or run.journal_cut else undecided


def _changes(bug: BugNights, before: Verdict, last: int) -> Iterator[Change]:
    """Yield what the last nights changed: a new state, or that the bug did not run any more.

    before: the state at the end of the night before them. last: the number of last nights.
    """
    earlier, new = bug.nights[-last - 1], bug.nights[-last:]
    ran = [run for cell in new for run in cell.runs[:1]]
    change = partial(Change, scenario=bug.scenario, evidence=bug.evidence)
    verdict = bug.state.verdict
    if verdict is not before and ran:
        # A fix that the scenario only declares is no claim: no boots were compared.
        call = verdict is Verdict.REGRESSED or (verdict is Verdict.FIXED and bug.state.crashed > 0)
        text = f"{verdict} (was {before}): {bug.reason}"
        yield change(kind=verdict, call=call, text=text, run=ran[-1])
    if earlier.runs and not new[-1].runs:
        text = f"it ran in the night of {earlier.night}, and not in the last one"
        yield change(kind="not run", text=text, run=earlier.runs[0])
