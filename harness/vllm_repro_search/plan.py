"""State of a search.

The plan of a search is a value with `next` (what to boot next, or None), `after` (the plan after
more boots) and `state`. The same results give the same plan, so a resumed search needs nothing
else.
"""

from __future__ import annotations

from enum import StrEnum


class SearchState(StrEnum):
    """State of a search. The values are those of the JSON files."""

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
        """Return True if an end of a bisection is not as the user named it."""
        return self in (SearchState.GOOD_END_WRONG, SearchState.BAD_END_WRONG)
