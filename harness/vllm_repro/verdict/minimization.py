"""Search of the smallest set of parts that still shows a bug: delta debugging (ddmin's complements). Pure.

A part is a flag, with its value, of the reported command. The search is a function of the sets that were tried, so a resume needs nothing
else. A part that others need goes only together with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

__all__ = ["Minimization"]


class _Untried(Exception):
    """A set must be tried before the search can go on."""

    def __init__(self, parts: frozenset[str]) -> None:
        self.parts = parts


@dataclass(frozen=True, kw_only=True)
class Minimization:
    """The reduction of `parts`. tried: True for a set that shows the bug. needs: parts that a part cannot be without."""

    parts: tuple[str, ...]
    needs: Mapping[str, frozenset[str]] = field(default_factory=dict)
    tried: Mapping[frozenset[str], bool] = field(default_factory=dict)

    def after(self, parts: frozenset[str], *, bug: bool) -> Minimization:
        """Return the search with one more set."""
        return replace(self, tried={**self.tried, parts: bug})

    def choose(self) -> frozenset[str] | None:
        """Return the set to try next, all parts first; None if the search is over."""
        try:
            self._reduce()
        except _Untried as untried:
            return untried.parts
        return None

    def smallest(self) -> frozenset[str] | None:
        """Return the smallest set by now that shows the bug; None without one."""
        return min((parts for parts, bug in self.tried.items() if bug), key=len, default=None)

    def _shows(self, parts: frozenset[str]) -> bool:
        if parts not in self.tried:
            raise _Untried(parts)
        return self.tried[parts]

    def _without(self, parts: frozenset[str], removed: frozenset[str]) -> frozenset[str]:
        """Return `parts` without `removed` and all that need one of them."""
        left = parts - removed
        while broken := {part for part in left if self.needs.get(part, frozenset()) - left}:
            left -= broken
        return left

    def _reduce(self) -> None:
        """Remove ever smaller groups until no single part can go. Raises `_Untried`."""
        kept = frozenset(self.parts)
        if not self._shows(kept):
            return
        size = max(1, len(kept) // 2)
        while True:
            before = kept
            place = 0
            while place < len(order := [part for part in self.parts if part in kept]):
                smaller = self._without(kept, frozenset(order[place : place + size]))
                if self._shows(smaller):
                    kept = smaller
                else:
                    place += size
            if size == 1 and kept == before:
                return
            size = max(1, size // 2)
