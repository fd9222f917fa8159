"""Search of the shortest prompt that crashes. Pure.

A quiet prompt leaves the server up, so the next one costs seconds; a crash costs a boot. Within one
boot every answer but the last is quiet, so the prompts of a boot can be listed before it starts:
the path that the search takes while all of them are quiet.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from vllm_repro_search.plan import SearchState

_MOST_PROMPTS = 40
"""Prompts in one boot."""
_SHARE = 0.165
"""Share of a gap at which to send the next prompt.

A crash costs as much as about 10 quiet prompts, so a quiet answer is made likelier: both answers
are worth their cost at the share f with f = (1 - f) ** 10.
"""


class PromptResult(StrEnum):
    """Result of one prompt: quiet (answered in full), crash, or skip (it decides nothing)."""

    QUIET = "quiet"
    CRASH = "crash"
    SKIP = "skip"  # anything but a complete answer or a death of this bug


@dataclass(frozen=True)
class PromptSent:
    """One prompt, its length in tokens, and its result."""

    # in tokens
    length: int
    answer: PromptResult
    # nothing was sent to its server before
    first: bool = False


@dataclass(frozen=True, kw_only=True)
class ThresholdPlan:
    """Plan of the search for the shortest crashing prompt of `low` to `high` tokens.

    It begins with `low` and lengths up to `guess`.
    """

    low: int
    high: int
    # the shortest crashing prompt by the scenario's formula, above `low`
    guess: int
    probes: tuple[PromptSent, ...] = ()

    def after(self, *probes: PromptSent) -> ThresholdPlan:
        """Return the plan after more prompts."""
        return replace(self, probes=(*self.probes, *probes))

    def lengths(self, answer: PromptResult) -> set[int]:
        """Return the prompt lengths that gave this result."""
        return {probe.length for probe in self.probes if probe.answer == answer}

    @property
    def shortest_crash(self) -> int | None:
        """Return the length of the shortest prompt that crashed; None without one."""
        return min(self.lengths(PromptResult.CRASH), default=None)

    @property
    def longest_quiet(self) -> int | None:
        """Return the longest quiet length below the shortest crash; None without one."""
        limit = self.shortest_crash or self.high + 1
        return max(
            (length for length in self.lengths(PromptResult.QUIET) if length < limit), default=None
        )

    @property
    def quiet_above(self) -> tuple[int, ...]:
        """Return the lengths of quiet prompts of at least the shortest crashing length.

        If there are any, length alone does not decide.
        """
        crash = self.shortest_crash
        return tuple(
            sorted(
                length for length in self.lengths(PromptResult.QUIET) if crash and length >= crash
            )
        )

    @property
    def crashes_alone(self) -> bool:
        """Return True if the shortest crashing prompt alone crashed a fresh server."""
        return PromptSent(self.shortest_crash or 0, PromptResult.CRASH, first=True) in self.probes

    @property
    def state(self) -> SearchState:
        """Return whether the search is open, has an answer, or cannot get one."""
        crash, quiet = self.shortest_crash, self.longest_quiet
        if self.quiet_above:
            return SearchState.SURPRISE
        if self.next_prompt() is not None:
            return SearchState.OPEN
        if crash is None:
            return (
                SearchState.QUIET
                if quiet == self.high and not self.lengths(PromptResult.SKIP)
                else SearchState.STUCK
            )
        if quiet is None:
            return SearchState.ALL if crash == self.low else SearchState.STUCK
        return SearchState.FOUND if crash == quiet + 1 else SearchState.STUCK

    def next_prompt(self) -> PromptSent | None:
        """Return the prompt to send next, with its expected answer; None if the search is over."""
        if self.quiet_above:
            return None
        crash, quiet = self.shortest_crash, self.longest_quiet
        skipped = self.lengths(PromptResult.SKIP)
        # Some below the guess, its neighbour, the guess.
        for length in (self.low, (self.low + self.guess) // 2, self.guess - 1, self.guess):
            if (
                length not in skipped
                and (quiet is None or length > quiet)
                and (crash is None or length < crash)
            ):
                return PromptSent(
                    length, PromptResult.QUIET if length < self.guess else PromptResult.CRASH
                )
        bottom = self.low - 1 if quiet is None else quiet
        top = self.high + 1 if crash is None else crash
        left = [length for length in range(bottom + 1, top) if length not in skipped]
        if left:
            middle = self._split(bottom, top, known=crash is not None)
            return PromptSent(
                min(left, key=lambda length: abs(length - middle)), PromptResult.QUIET
            )
        return self._check(crash) if crash is not None and top - bottom == 1 else None

    def _split(self, bottom: int, top: int, *, known: bool) -> int:
        """Return the length at which to divide the gap between `bottom` and `top`.

        bottom: the longest quiet length, or `low` - 1. known: a prompt of `top` tokens crashed.
        """
        if not known:  # the guess was quiet: away from it in steps that double
            return bottom + max(1, bottom - self.guess + 1)
        return bottom + max(1, round(_SHARE * (top - bottom)))

    def _check(self, crash: int) -> PromptSent | None:
        """Return the next prompt that checks the known threshold; None if all checks are done.

        First the threshold is sent alone to a fresh server, then longer prompts.
        """
        alone = any(probe.first for probe in self.probes if probe.length == crash)
        again = sum(probe.length == crash for probe in self.probes) > 1
        if not alone and not again:
            return PromptSent(crash, PromptResult.CRASH)
        longest = max(probe.length for probe in self.probes)
        above = ((crash + self.high) // 2, self.high)
        length = next((length for length in above if length > longest), None)
        return None if length is None else PromptSent(length, PromptResult.CRASH)

    def next(self) -> tuple[int, ...] | None:
        """Return the prompt lengths of the next boot, in order; None if the search is over."""
        lengths: list[int] = []
        plan = self
        while len(lengths) < _MOST_PROMPTS and (chosen := plan.next_prompt()) is not None:
            known = plan.shortest_crash
            if lengths and known is not None and chosen.length >= known:
                break  # on a server of its own
            lengths.append(chosen.length)
            if known is not None and chosen.length >= known:
                break
            plan = plan.after(PromptSent(chosen.length, PromptResult.QUIET))
        return tuple(lengths) or None
