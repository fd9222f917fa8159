"""Search of the shortest prompt that crashes. Pure.

A quiet prompt leaves the server up, so the next one costs seconds; a crash costs a boot. Within one boot every answer but the last is
quiet, so the prompts of a boot can be listed before it starts: the path that the search takes while all of them are quiet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = ["Answer", "Probe", "Search", "State"]

_MOST_PROMPTS = 40
"""Prompts in one boot."""


class Answer(StrEnum):
    """Result of one prompt."""

    QUIET = "quiet"
    CRASH = "crash"
    SKIP = "skip"  # anything but a complete answer or a death of this bug


@dataclass(frozen=True)
class Probe:
    """One prompt. first: nothing was sent to its server before."""

    length: int
    answer: Answer
    first: bool = False


class State(StrEnum):
    """How far a search is."""

    OPEN = "open"
    FOUND = "found"
    QUIET = "quiet"  # no prompt up to the longest one crashes
    ALL = "all"  # the shortest prompt that may be sent crashes
    STUCK = "stuck"  # the lengths that are left gave no answer
    SURPRISE = "surprise"  # a longer prompt is quiet, or the crash needs the prompts before it


@dataclass(frozen=True, kw_only=True)
class Search:
    """The search among the lengths `low` to `high`. It is a value: the same probes give the same search.

    guess: the shortest crashing prompt by the scenario's formula. crash_cost: of a crash, in quiet prompts.
    """

    low: int
    high: int
    guess: int
    crash_cost: float = 10.0
    probes: tuple[Probe, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.low < self.guess <= self.high or self.crash_cost < 1:
            raise ValueError(f"no search: {self.low} < {self.guess} <= {self.high}, crash cost {self.crash_cost}")

    def after(self, *probes: Probe) -> Search:
        """Return the search with more prompts."""
        return replace(self, probes=(*self.probes, *probes))

    def lengths(self, answer: Answer) -> set[int]:
        """Return the lengths with this answer."""
        return {probe.length for probe in self.probes if probe.answer is answer}

    @property
    def shortest_crash(self) -> int | None:
        return min(self.lengths(Answer.CRASH), default=None)

    @property
    def longest_quiet(self) -> int | None:
        """The longest quiet prompt below the shortest crashing one."""
        limit = self.shortest_crash or self.high + 1
        return max((one for one in self.lengths(Answer.QUIET) if one < limit), default=None)

    @property
    def quiet_above(self) -> tuple[int, ...]:
        """Quiet prompts longer than the shortest crashing one: the bug is not a matter of length alone."""
        crash = self.shortest_crash
        return tuple(sorted(one for one in self.lengths(Answer.QUIET) if crash is not None and one >= crash))

    @property
    def state(self) -> State:
        if self.quiet_above:
            return State.SURPRISE
        if self.choose() is not None:
            return State.OPEN
        crash, quiet = self.shortest_crash, self.longest_quiet
        if crash is None:
            return State.QUIET if quiet == self.high and not self.lengths(Answer.SKIP) else State.STUCK
        if quiet is None:
            return State.ALL if crash == self.low else State.STUCK
        return State.FOUND if crash == quiet + 1 else State.STUCK

    def choose(self) -> Probe | None:
        """Return the prompt to send next, as a probe with the answer that is expected; None if the search is over."""
        if self.quiet_above:
            return None
        crash, quiet, skipped = self.shortest_crash, self.longest_quiet, self.lengths(Answer.SKIP)
        for length in self._first():
            if length not in skipped and (quiet is None or length > quiet) and (crash is None or length < crash):
                return Probe(length, Answer.QUIET if length < self.guess else Answer.CRASH)
        bottom, top = (self.low - 1 if quiet is None else quiet), (self.high + 1 if crash is None else crash)
        left = [one for one in range(bottom + 1, top) if one not in skipped]
        if left:
            wanted = self._split(bottom, top, known=crash is not None)
            return Probe(min(left, key=lambda one: abs(one - wanted)), Answer.QUIET)
        return self._check(crash) if crash is not None and top - bottom == 1 else None

    def _first(self) -> Iterator[int]:
        """Yield the lengths to try before any search: a few below the guess, its neighbour, the guess."""
        yield from (self.low, (self.low + self.guess) // 2, self.guess - 1, self.guess)

    def _split(self, bottom: int, top: int, *, known: bool) -> int:
        """Return where to divide the gap. known: its upper end crashed."""
        if not known:  # the guess was quiet: away from it in steps that double
            return min(top - 1, bottom + max(1, bottom - self.guess + 1))
        low, high = 0.0, 1.0
        # The share f of the gap at which both answers are worth their cost: f = (1 - f) ** cost.
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if middle < (1 - middle) ** self.crash_cost else (low, middle)
        return bottom + max(1, round(low * (top - bottom)))

    def _check(self, crash: int) -> Probe | None:
        """Return what is left once the threshold is known: it alone on a fresh server, then longer prompts up to the longest."""
        tried = {probe.length for probe in self.probes if probe.length > crash}
        alone = any(probe.first for probe in self.probes if probe.length == crash)
        again = sum(probe.length == crash for probe in self.probes) > 1
        if not alone and not again:
            return Probe(crash, Answer.CRASH)
        above = [one for one in dict.fromkeys(((crash + self.high) // 2, self.high)) if one > crash]
        length = next((one for one in above if not any(other >= one for other in tried)), None)
        return None if length is None else Probe(length, Answer.CRASH)

    def plan(self) -> tuple[int, ...]:
        """Return the prompts of the next boot, in order; empty if the search is over."""
        lengths: list[int] = []
        search = self
        while len(lengths) < _MOST_PROMPTS and (chosen := search.choose()) is not None:
            known = search.shortest_crash
            if lengths and known is not None and chosen.length >= known:
                break  # on a server of its own
            lengths.append(chosen.length)
            if known is not None and chosen.length >= known:
                break
            search = search.after(Probe(chosen.length, Answer.QUIET))
        return tuple(lengths)
