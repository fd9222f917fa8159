"""Interrupted runs, and the trials that they still need. Pure, apart from reading their files.

Resume a run only with the same scenario, machine and servers. Finished trials count; an interrupted
trial is repeated under the next number.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm_repro.errors import UsageError
from vllm_repro.journal.journal import Recording, head_of, legible, read
from vllm_repro.running.trial_order import Trials
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """Interrupted work, such as a run, that `--resume` continues in its folder."""

    # noun for messages, such as "run"
    what: ClassVar[str]
    # folders between the folder of all runs and this one
    depth: ClassVar[int] = 2
    # keys of `head` whose values must be the same in the resumed run
    must_not_change: Sequence[str]
    folder: Path
    # command line, from the verb on
    words: tuple[str, ...]
    # first line of the journal, or the JSON file
    head: Mapping[str, Any]

    @property
    def out(self) -> Path:
        """The folder of all runs."""
        return self.folder.parents[self.depth]

    @staticmethod
    def _compared(head: Mapping[str, Any], name: str) -> Any:
        """Return the value of a field to compare; a subclass may ignore a part of it."""
        return head.get(name)

    def refuse_changed(self, now: Mapping[str, Any]) -> None:
        """Raise `UsageError` if `now` differs from `head` in a field that must not change."""
        for name in self.must_not_change:
            if self._compared(now, name) != self._compared(self.head, name):
                raise UsageError(
                    f"cannot resume the {self.what} in {self.folder}: its {name.replace('_', ' ')}"
                    " has changed since",
                    hint=f"start a new {self.what}; the old one stays in its folder",
                )


@dataclass(frozen=True, kw_only=True)
class UnfinishedRun(Unfinished):
    """An interrupted run to resume, with the trials that it has finished."""

    what = "run"
    depth = 1
    must_not_change: Sequence[str] = (
        "scenario", "arms", "trigger", "status", "loads", "output", "evidence", "server",
        "version", "machine", "docker", "harness_version",
    )  # fmt: skip
    trials: Trials


def read_run(folder: Path) -> UnfinishedRun:
    """Return the interrupted run in `folder`, to resume it.

    Raises `UsageError` if `folder` has no readable journal, or one of a finished run or of a
    command other than `run`.
    """
    with legible(folder):
        return unfinished_run(read(folder / "journal.jsonl"), folder.resolve())


def unfinished_run(recording: Recording, folder: Path) -> UnfinishedRun:
    """Return the interrupted run of a journal that is read already; raise as `read_run` does."""
    started = head_of(recording, folder, hint="start a new run")
    ended = recording.end
    if ended is not None and not ended["interrupted"]:
        raise UsageError(f"the run in {folder} is finished", hint=f"again: {started['reproduce']}")
    words = shlex.split(started["reproduce"])
    if words[1:2] != ["run"]:
        raise UsageError(
            f"the run in {folder} belongs to another command", hint=f"again: {started['reproduce']}"
        )
    expected = {arm["name"]: Expected(arm["expected"]) for arm in started["arms"]}
    trials = Trials()
    for entry in recording.of("trial-ended"):
        arm, outcome = entry["arm"], Outcome(entry["outcome"])
        if outcome is not Outcome.CANCELLED:
            trials.finish(
                arm, expected[arm], outcome, entry["during"], crossed=entry["trigger"]["crossed"]
            )
    for entry in recording.of("trial-started"):
        trials.last[entry["arm"]] = max(trials.last[entry["arm"]], entry["trial"])
    # After a power failure the journal may lack a trial whose log exists. A new trial must not
    # append to it.
    for log in (folder / "logs").glob("*.log"):
        arm, _, number = log.name.partition(".")[0].rpartition("-")
        if arm in expected and number.isdecimal():
            trials.last[arm] = max(trials.last[arm], int(number))
    return UnfinishedRun(
        folder=folder, words=tuple(words[words.index("run") :]), head=started.fields, trials=trials
    )
