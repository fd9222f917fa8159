"""Shrinking of a case that fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

_MOST_S = 60.0
"""Seconds of processor time after which a case is kept as small as it is."""
Case = TypeVar("Case")


def smallest(
    case: Case, simpler: Callable[[Case], Iterable[Case]], fails: Callable[[Case], bool]
) -> Case:
    """Return the case that is reached by taking the first simpler one that fails, again and again.

    fails: returns True if a case fails in the way that is looked for.
    """
    until = time.process_time() + _MOST_S
    while True:
        candidates = (each for each in simpler(case) if time.process_time() < until)
        smaller = next((each for each in candidates if fails(each)), None)
        if smaller is None:
            return case
        case = smaller
