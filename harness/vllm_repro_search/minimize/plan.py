"""Search of the smallest part of a command and workload that still crashes: delta debugging. Pure.

A unit is a flag with its value, an environment variable, or a request; here it is a number. The
search is a function of its attempts. Whatever does not crash keeps its units: also a command that
vLLM refuses. Units that are refused one by one are tried as a group.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

from vllm_repro_search.plan import SearchState

Units = tuple[int, ...]
_Walk = Generator[Units, "Attempt", Units]


@dataclass(frozen=True)
class Attempt:
    """One boot of a command with only some units: their numbers, and how the boot ended.

    After a crash, `unused` has the requests that were not sent: the crash does not need them.
    """

    units: Units
    crashed: bool
    # vLLM did not start
    refused: bool = False
    # requests that a crash left unsent, so it did not need them
    unused: Units = ()

    @property
    def used(self) -> Units:
        """Return the units without the requests that the crash left unsent."""
        return _less(self.units, self.unused)


@dataclass(frozen=True, kw_only=True)
class MinimizationPlan:
    """Plan that reduces the units 0 to `requests + others` - 1, requests first."""

    requests: int
    others: int
    attempts: tuple[Attempt, ...] = ()

    def after(self, *attempts: Attempt) -> MinimizationPlan:
        """Return the plan after more attempts."""
        return replace(self, attempts=(*self.attempts, *attempts))

    @property
    def kept(self) -> Units | None:
        """Return the smallest crashing set by now; None without a crash."""
        return next((attempt.used for attempt in reversed(self.attempts) if attempt.crashed), None)

    @property
    def state(self) -> SearchState:
        """Return whether the search is open, has an answer, or the whole lives or is refused."""
        if self.next() is not None:
            return SearchState.OPEN
        if self.kept is None:
            return SearchState.STUCK if self.attempts[0].refused else SearchState.QUIET
        return SearchState.FOUND

    def next(self) -> Units | None:
        """Return the units of the next boot; None if the search is over."""
        known = {attempt.units: attempt for attempt in self.attempts}
        walk = self._walk()
        try:
            units = next(walk)
            while units in known:
                units = walk.send(known[units])
        except StopIteration:
            return None
        return units

    def _walk(self) -> _Walk:
        """Yield each set to try, and get its attempt by `send`.

        Return a set that does not crash without any one of its units; empty if the whole does not
        crash.
        """
        everything = tuple(range(self.requests + self.others))
        first = yield everything
        if not first.crashed:
            return ()
        kept = first.used
        for part in (everything[: self.requests], everything[self.requests :]):
            size = len(part)
            while (size := size // 2) > 1:
                kept = yield from _remove(kept, part, size)
        while True:
            smaller = yield from _remove(kept, everything, 1)
            if smaller == kept:
                smaller = yield from _remove_refused(kept)
                if smaller == kept:
                    return kept
            kept = smaller


def _less(units: Units, removed: Units) -> Units:
    """Return `units` without `removed`."""
    return tuple(unit for unit in units if unit not in removed)


def _remove(kept: Units, part: Units, size: int) -> _Walk:
    """Yield `kept` without `size` neighbours of `part` at a time, as `_walk` does.

    Each set that crashes replaces `kept`; return the last one.
    """
    place = 0
    while removed := tuple(unit for unit in kept if unit in part)[place : place + size]:
        attempt = yield _less(kept, removed)
        if attempt.crashed:
            kept = attempt.used
        else:
            place += size
    return kept


def _remove_refused(kept: Units) -> _Walk:
    """Yield the sets to try to remove together the units without which vLLM did not start.

    Each was left out alone before; they may need each other. Return what is left of `kept`.
    """
    refused: Units = ()
    for unit in kept:
        if (yield _less(kept, (unit,))).refused:
            refused += (unit,)
    if len(refused) < 2:
        return kept
    attempt = yield _less(kept, refused)
    return attempt.used if attempt.crashed else kept
