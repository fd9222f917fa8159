"""Of a journal, the entries that a report is made from. Pure.

A run of thousands of boots writes the same command, facts and requests for each. A report shows them once an arm, so no more is kept in
memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from vllm_repro.journal import Entry

__all__ = ["thinned"]

_WHOLE = frozenset(
    {
        *("run-started", "run-resumed", "run-ended", "trial-ended"),
        *("output", "soak", "measure-stopped", "throughput-round", "throughput-point"),
    }
)
_FIRST_OF_ARM = frozenset({"trial-started", "server-started", "server-booted"})
_COUNTED = frozenset({"request-sent", "answer"})


def thinned(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Those that a report needs, in their order. The last entry of each part of the run is among them: it says how long that part took."""
    seen: set[tuple[str, str]] = set()
    passed_over: Entry | None = None
    for entry in entries:
        if entry.event == "run-resumed" and passed_over is not None:
            yield passed_over
        kept = _kept(entry, seen)
        passed_over = None
        if kept is not None:
            yield kept
        else:
            passed_over = replace(entry, fields={})
    if passed_over is not None:
        yield passed_over


def _kept(entry: Entry, seen: set[tuple[str, str]]) -> Entry | None:
    if entry.event in _WHOLE:
        return entry
    if entry.event in _FIRST_OF_ARM:
        one = (entry.event, str(entry["arm"]))
        first = one not in seen
        seen.add(one)
        return entry if first else None
    if entry.event in _COUNTED and not (entry.event == "request-sent" and entry["trial"] == 1):
        # How many there were, and how each was answered; what an error said is in the trial's end.
        fields = {name: entry.get(name) for name in ("arm", "trial", "status", "finish_reason")}
        return replace(entry, fields={**fields, "error": None if entry.get("error") is None else "…"})
    return entry if entry.event == "request-sent" else None
