"""Event of a copy that no device makes. Imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Event:
    """Event that is complete at poll number `polls` + 1, or at once after `synchronize`.

    copy: called once, when the event becomes complete.
    """

    def __init__(self, polls: int = 0, copy: Callable[[], None] = lambda: None) -> None:
        self._left, self._copy = polls, copy
        self.over = False

    def query(self) -> bool:
        """Count a poll; return True if the event is complete."""
        self._left -= 1
        if self._left < 0:
            self.synchronize()
        return self.over

    def synchronize(self) -> None:
        """Complete the event now, and call its `copy` unless that was done."""
        if not self.over:
            self.over = True
            self._copy()

    def record(self, *_: Any) -> None:
        """Do nothing: there is no stream."""
