"""What a run that was cut has left to do. Pure, apart from reading the journal.

A run is gone on with only as it was begun: same scenario, same machine, same servers. Boots that ended count; one that was cut is made
again, under the next number, and what is known of it stays where it is.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_repro.errors import UsageError
from vllm_repro.journal.journal import Recording, head_of, legible, read
from vllm_repro.scenario.scenario import Arm
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected, is_other

__all__ = ["Left", "left_of", "read_left"]

SAME = (
    "scenario",
    "arms",
    "trigger",
    "status",
    "loads",
    "output",
    "evidence",
    "server",
    "version",
    "machine",
    "docker",
    "harness_version",
)
"""Of the journal's first line: what a run and its second part must have in common to be one run."""


@dataclass(frozen=True)
class Left:
    """words: what `vllm-repro` was called with. By arm, outcomes: of the boots that ended; strange: how many of those look like the bug and
    do not count as it; last: the highest number of a boot."""

    folder: Path
    words: tuple[str, ...]
    header: Mapping[str, Any]
    outcomes: Mapping[str, tuple[Outcome, ...]]
    strange: Mapping[str, int]
    last: Mapping[str, int]

    def refuse_other(self, header: Mapping[str, Any]) -> None:
        """Raises `UsageError` where the journal line of a run that would start now is not that of the one that was cut."""
        for name in SAME:
            if header.get(name) != self.header.get(name):
                raise UsageError(
                    f"the run in {self.folder} cannot be gone on with: its {name.replace('_', ' ')} has changed since",
                    hint="run it anew; what that run saw stays in its folder",
                )

    def boots(self, whole: Iterable[tuple[int, Arm]]) -> Iterator[tuple[int, Arm]]:
        """Of all boots of a plan, in their order, those that are left."""
        done = {arm: len(those) for arm, those in self.outcomes.items()}
        return ((n, arm) for n, arm in whole if n > done.get(arm.name, 0))


def read_left(folder: Path) -> Left:
    """Raises `UsageError` where there is no journal in `folder`, or one of a run that came to its end."""
    with legible(folder):
        return left_of(read(folder / "journal.jsonl"), folder.resolve())


def left_of(recording: Recording, folder: Path) -> Left:
    started = head_of(recording, folder, hint="run it anew")
    ended = recording.end
    if ended is not None and not ended["interrupted"]:
        raise UsageError(f"the run in {folder} came to its end", hint=f"again: {started['reproduce']}")
    words = shlex.split(started["reproduce"])
    if words[1:2] != ["run"]:
        raise UsageError(f"the run in {folder} is a part of something else", hint=f"again: {started['reproduce']}")
    expected = {arm["name"]: Expected(arm["expected"]) for arm in started["arms"]}
    outcomes: dict[str, list[Outcome]] = {}
    strange: Counter[str] = Counter()
    for entry in recording.of("trial-ended"):
        arm, outcome = entry["arm"], Outcome(entry["outcome"])
        if outcome is not Outcome.CANCELLED:
            outcomes.setdefault(arm, []).append(outcome)
            strange[arm] += is_other(expected[arm], outcome, entry["during"], crossed=entry["trigger"]["crossed"])
    last: dict[str, int] = {}
    for entry in recording.of("trial-started"):
        last[entry["arm"]] = max(last.get(entry["arm"], 0), entry["trial"])
    return Left(
        folder,
        tuple(words[words.index("run") :]),
        started.fields,
        {arm: tuple(those) for arm, those in outcomes.items()},
        strange,
        last,
    )
