"""Of a journal, the entries that a report is made from. Pure.

A run of thousands of boots writes the same command, facts and requests for each. A report shows them once an arm, and of an arm's trials
with one outcome it draws the first ones, so no more is kept in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from vllm_repro.journal.journal import Entry
from vllm_repro.verdict.outcome import Outcome

__all__ = ["DRAWN", "thinned"]

DRAWN = 60
"""Trials of one arm and outcome of which everything is kept that a timeline shows."""

_MEASURED = frozenset({"output", "soak", "measure-stopped", "throughput-round", "throughput-point"})
_FIRST_OF_ARM = frozenset({"trial-started", "server-started", "server-booted"})


def thinned(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Those that a report needs, in their order. What a cut left of a trial is among them whole: it says how long that took."""
    thin = _Thin()
    trial: list[Entry] = []
    for entry in entries:
        if trial and entry.event in ("trial-started", "run-resumed", "run-ended"):
            yield from thin.drawn(trial)  # it has no end on record
            trial = []
        if not trial and entry.event != "trial-started":
            yield entry
            continue
        trial.append(entry)
        if entry.event == "trial-ended":
            yield from thin.of(trial)
            trial = []
    yield from thin.drawn(trial)


@dataclass
class _Thin:
    told: set[tuple[str, str]] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    """Arms of which a trial that was not cut has its requests kept whole."""
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)

    def of(self, trial: list[Entry]) -> Iterator[Entry]:
        """The entries of a trial from its start to its end, as many as one more of its kind needs."""
        kind = str(trial[-1]["arm"]), str(trial[-1]["outcome"])
        self.ended[kind] += 1
        return self.drawn(trial) if self.ended[kind] <= DRAWN else self._counted(trial)

    def drawn(self, trial: list[Entry]) -> Iterator[Entry]:
        for entry in trial:
            if entry.event in _FIRST_OF_ARM and not self._first(entry):
                yield _only(entry, "arm", "trial")
            elif entry.event == "request-sent" and entry["arm"] in self.asked:
                yield _only(entry, "arm", "trial", "name", "prompt_tokens")
            else:
                yield entry
        self._whole(trial)

    def _counted(self, trial: list[Entry]) -> Iterator[Entry]:
        for entry in trial:
            asked = entry.event == "request-sent"
            if (
                entry.event == "trial-ended"
                or entry.event in _MEASURED
                or (entry.event in _FIRST_OF_ARM and self._first(entry))
                or (asked and entry["arm"] not in self.asked)
            ):
                yield entry
            elif asked or entry.event == "answer":
                # How many there were, and how each was answered; what an error said is in the trial's end.
                short = _only(entry, "arm", "trial", "status", "finish_reason")
                yield replace(short, fields={**short.fields, "error": None if entry.get("error") is None else "…"})
        self._whole(trial)

    def _whole(self, trial: list[Entry]) -> None:
        """Notes whose requests are told by now. Those of a boot that was cut are told only where there is no other."""
        last = trial[-1] if trial else None
        if last is not None and last.event == "trial-ended" and last["outcome"] != Outcome.CANCELLED:
            self.asked.update(str(entry["arm"]) for entry in trial if entry.event == "request-sent")

    def _first(self, entry: Entry) -> bool:
        one = (entry.event, str(entry["arm"]))
        first = one not in self.told
        self.told.add(one)
        return first


def _only(entry: Entry, *names: str) -> Entry:
    return replace(entry, fields={name: entry.get(name) for name in names})
