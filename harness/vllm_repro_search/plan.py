"""The interface of all searches: what to boot next, the plan after a boot, the answer so far. Pure.

A plan is a value: the same results give the same plan, so a resumed search needs nothing else.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol, Self, TypeVar

__all__ = ["Plan", "SearchState"]

Item = TypeVar("Item", covariant=True)
BootResult = TypeVar("BootResult", contravariant=True)
PlanAnswer = TypeVar("PlanAnswer", covariant=True)


class SearchState(StrEnum):
    """How far a search is. The first word of each line is what the JSON files have."""

    OPEN = "open"
    FOUND = "found"
    STUCK = "stuck"  # what is left gives no answer
    QUIET = "quiet"  # nothing that may be booted shows the bug
    ALL = "all"  # the smallest that may be booted shows it
    SURPRISE = "surprise"  # the results contradict each other
    GOOD_END_WRONG = "good-end-wrong"
    BAD_END_WRONG = "bad-end-wrong"

    @property
    def exit_status(self) -> int:
        """Return 0 for an answer, 1 for a surprise, 2 if undecided."""
        if self is SearchState.SURPRISE:
            return 1
        return 2 if self in (SearchState.OPEN, SearchState.STUCK) else 0

    @property
    def wrong_end(self) -> bool:
        return self in (SearchState.GOOD_END_WRONG, SearchState.BAD_END_WRONG)


class Plan(Protocol[Item, BootResult, PlanAnswer]):
    """A search as a function of the results of its boots."""

    def next(self) -> Item | None:
        """Return what to boot next; None if the search is over."""

    def after(self, *results: BootResult) -> Self:
        """Return the plan after more boots."""

    def answer(self) -> PlanAnswer:
        """Return what is known by now."""
