"""Search: play cases, and shrink the first case of each finding.

Scheduler, KV cache manager and connectors are Python and need no device, so they are searched
alone. A finding is a lead: a real server decides.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from vllm_repro_explore.case import Case
from vllm_repro_explore.finding import Finding, FindingKind, PlayResult, known
from vllm_repro_explore.shrink import shrink

Play = Callable[[Case], PlayResult]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A finding with its first seed and its smallest case."""

    finding: Finding
    seed: int
    case: Case
    # the smallest case
    shrunk: Case
    # cases played to shrink it
    tried: int
    # other findings of that case
    others: tuple[Finding, ...] = ()
    # cases whose worst finding it is
    times: int = 1
    # result of the smallest case over the release's own model runner
    runner: PlayResult | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the finding as a JSON object of findings.jsonl and explore.json."""
        return {
            "kind": self.finding.kind.value,
            "site": self.finding.site,
            "detail": self.finding.detail,
            "known": known(self.finding) or None,
            "seed": self.seed,
            "times": self.times,
            "with": [finding.site for finding in self.others],
            "case": self.shrunk.as_json(),
            "drawn": self.case.as_json(),
            "shrunk_in": self.tried,
            "model_runner": self.on_runner,
        }

    @property
    def on_runner(self) -> str | None:
        """Return in words what the smallest case shows over the release's own model runner.

        That is `the same`, `nothing`, another finding, or why it was not tried. None if the case
        was not played over it.
        """
        if self.runner is None:
            return None
        if self.runner.invalid:
            return f"not tried: {self.runner.invalid}"
        if (worst := self.runner.worst) is None:
            return "nothing"
        # The model runner does not report by which rule a state is lost.
        same = worst.kind is self.finding.kind and self.finding.site.startswith(worst.site)
        return "the same" if same else f"{worst}"


@dataclass
class Tally:
    """Counts and findings of a search so far."""

    # cases played, with those that vLLM refused at start
    trials: int = 0
    # cases that vLLM refused at start
    invalid: int = 0
    steps: int = 0
    # first and last seed
    first: int | None = None
    last: int | None = None
    # cases per event, such as a preemption or a load
    reached: Counter[str] = field(default_factory=Counter)
    why_invalid: Counter[str] = field(default_factory=Counter)
    hits: dict[tuple[FindingKind, str], Found] = field(default_factory=dict)

    @property
    def findings(self) -> list[Found]:
        """Return the findings, worst first."""
        return sorted(self.hits.values(), key=lambda hit: (hit.finding.rank, hit.seed))


def search(
    players: Sequence[Play],
    cases: Iterable[tuple[int, Case]],
    *,
    go_on: Callable[[], bool],
    keep: Callable[[Found], None] = lambda _: None,
    progress: Callable[[Tally], None] = lambda _: None,
    on_runner: Sequence[Play] = (),
    budget: int = 300,
    tally: Tally | None = None,
) -> Tally:
    """Run cases until they run out or `go_on` returns False, and shrink the new findings.

    players: functions that run a case and return its result, each in a thread. A player shrinks
    what it finds while the others go on.

    keep: called with each new finding once it is shrunk. progress: called with the tally after each
    case. on_runner: for each player one that runs the smallest case over the release's own model
    runner. budget: most cases to shrink a finding. tally: filled in place, so that an interrupted
    search keeps its findings; it is returned. An exception of a player stops the search and is
    raised.
    """
    searching = _Searching(
        cases, go_on, keep, progress, budget, Tally() if tally is None else tally
    )
    pool = ThreadPoolExecutor(len(players))
    try:
        pending = {pool.submit(searching.work, *each) for each in zip_longest(players, on_runner)}
        while pending:
            # A signal that another thread gets wakes no endless wait.
            ended, pending = wait(pending, 1.0, return_when=FIRST_COMPLETED)
            for player in ended:
                player.result()
    finally:
        searching.over = True
        pool.shutdown()
    return searching.tally


class _OverError(Exception):
    """Stop of a player's thread that would run one more case when the search is over."""


@dataclass
class _Searching:
    """State of a search that the threads of its players share."""

    cases: Iterable[tuple[int, Case]]
    go_on: Callable[[], bool]
    keep: Callable[[Found], None]
    progress: Callable[[Tally], None]
    budget: int
    tally: Tally
    # play no more
    over: bool = False

    def __post_init__(self) -> None:
        self._cases = iter(self.cases)
        self._lock = threading.Lock()

    def work(self, play: Play, on_runner: Play | None) -> None:
        """Run cases until there are no more, and shrink what is new; called in a player's thread.

        An exception is raised, and stops the other threads too.
        """

        def unless_over(case: Case) -> PlayResult:
            """Run a case; raise `_OverError` instead once the search is over."""
            if self.over:
                raise _OverError
            return play(case)

        try:
            with suppress(_OverError):
                while (drawn := self._next()) is not None:
                    new = self._count(*drawn, unless_over(drawn[1]))
                    if new is not None:
                        self._shrink(new, unless_over, on_runner)
                    with self._lock:
                        self.progress(self.tally)
        except BaseException:
            self.over = True
            raise

    def _next(self) -> tuple[int, Case] | None:
        """Return the next seed and its case, or None once the search is to stop or has no more."""
        with self._lock:
            return None if self.over or not self.go_on() else next(self._cases, None)

    def _count(self, seed: int, case: Case, outcome: PlayResult) -> Found | None:
        """Add a result to the tally; return its worst finding if no earlier case had it, else None.

        Count nothing once the search is over.
        """
        tally = self.tally
        with self._lock:
            if self.over:
                return None
            tally.trials += 1
            tally.first = min(seed, tally.first or seed)
            tally.last = max(seed, tally.last or seed)
            tally.steps += outcome.steps
            tally.reached.update({name: 1 for name, count in outcome.counts.items() if count})
            if outcome.invalid:
                tally.invalid += 1
                tally.why_invalid[outcome.invalid.splitlines()[0][:100]] += 1
            if (worst := outcome.worst) is None:
                return None
            key = worst.kind, worst.site
            if (before := tally.hits.get(key)) is not None:
                tally.hits[key] = replace(before, times=before.times + 1)
                return None
            # Keep it before shrinking: an interrupt must not lose it.
            hit = Found(
                finding=worst,
                seed=seed,
                case=case,
                shrunk=case,
                tried=0,
                others=_others(outcome, worst),
            )
            tally.hits[key] = hit
            return hit

    def _shrink(self, hit: Found, play: Play, on_runner: Play | None) -> None:
        """Shrink a new finding's case, run the smallest over the model runner, `keep` the finding.

        The tally gets the smallest case. Once the search is over, nothing is kept.
        """
        last: PlayResult | None = None

        def fails(candidate: Case) -> bool:
            """Run a case; if its worst finding is this one, set `last` and return True."""
            nonlocal last
            result = play(candidate)
            last = result if result.worst == hit.finding else last
            return last is result

        shrunk = shrink(hit.case, fails, self.budget)
        small = replace(hit, shrunk=shrunk.case, tried=shrunk.tried)
        if last is not None:
            small = replace(
                small, finding=last.worst or hit.finding, others=_others(last, hit.finding)
            )
        if on_runner is not None:
            small = replace(small, runner=on_runner(small.shrunk))
        key = hit.finding.kind, hit.finding.site
        with self._lock:
            if not self.over:
                self.tally.hits[key] = replace(small, times=self.tally.hits[key].times)
                self.keep(self.tally.hits[key])


def _others(outcome: PlayResult, worst: Finding) -> tuple[Finding, ...]:
    """Return the findings of a case beside the worst one."""
    return tuple(finding for finding in outcome.findings if finding != worst)
