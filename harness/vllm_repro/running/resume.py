"""Interrupted runs, version maps and searches, and what is left of them to do. Pure, apart from reading their files.

A run resumes only as it was started: same scenario, machine and servers. Finished boots count; an interrupted boot is repeated under the
next number. A map resumes by looking at the runs that it names: a release whose run finished is not run again. A bisection and a threshold
keep their boots.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from vllm_repro.errors import UsageError
from vllm_repro.journal.journal import Recording, head_of, legible, read
from vllm_repro.report.bisection import Step
from vllm_repro.report.build import build
from vllm_repro.report.model import RunReport
from vllm_repro.report.threshold import Boot
from vllm_repro.running.boots import Boots
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.release_result import ReleaseResult
from vllm_repro.verdict.threshold import Answer, Probe
from vllm_repro.verdict.verdict import Expected

__all__ = [
    "UnfinishedBisection",
    "UnfinishedMap",
    "UnfinishedRun",
    "UnfinishedThreshold",
    "read_bisection",
    "read_map",
    "read_run",
    "read_threshold",
    "unfinished_run",
]


@dataclass(frozen=True, kw_only=True)
class _Unfinished:
    """Common part of what can be resumed.

    words: the command line, from the verb on. head: the first line of the journal, or the JSON file. must_not_change: keys of `head`.
    depth: folders between the folder of all runs and this one.
    """

    what: ClassVar[str]
    must_not_change: ClassVar[Sequence[str]]
    depth: ClassVar[int] = 2
    folder: Path
    words: tuple[str, ...]
    head: Mapping[str, Any]

    @property
    def out(self) -> Path:
        """The folder of all runs."""
        return self.folder.parents[self.depth]

    @staticmethod
    def _compared(head: Mapping[str, Any], name: str) -> Any:
        return head.get(name)

    def refuse_changed(self, now: Mapping[str, Any]) -> None:
        """Raise `UsageError` if one with this `head` would not be the same."""
        for name in self.must_not_change:
            if self._compared(now, name) != self._compared(self.head, name):
                raise UsageError(
                    f"cannot resume the {self.what} in {self.folder}: its {name.replace('_', ' ')} has changed since",
                    hint=f"start a new {self.what}; the old one stays in its folder",
                )


@dataclass(frozen=True, kw_only=True)
class UnfinishedRun(_Unfinished):
    """An interrupted run."""

    what = "run"
    depth = 1
    must_not_change = (
        "scenario", "arms", "trigger", "status", "loads", "output", "evidence", "server", "version", "machine", "docker", "harness_version",
    )  # fmt: skip
    boots: Boots


@dataclass(frozen=True, kw_only=True)
class UnfinishedMap(_Unfinished):
    """A version map on disk."""

    what = "map"
    must_not_change = ("status", "harness_version")

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(self.head["versions"])

    def report(self, version: str) -> RunReport | None:
        """Return the finished run of a release; None without one, or if the last trial of an arm is `infra`."""
        run = next((row["run"] for row in self.head["rows"] if row["version"] == version), None)
        folder = self.out / self.head["scenario"] / (run or "")
        if run is None or not (folder / "journal.jsonl").exists():
            return None
        report = build(folder)
        troubled = any(trial.outcome is Outcome.INFRA for arm in report.arms for trial in arm.trials[-1:])
        return None if report.shortfall or troubled else report


@dataclass(frozen=True, kw_only=True)
class UnfinishedBisection(_Unfinished):
    """A bisection on disk."""

    what = "bisection"
    must_not_change = ("status", "harness_version", "candidates")

    @staticmethod
    def _compared(head: Mapping[str, Any], name: str) -> Any:
        # What else a candidate holds is for the reader, and differs between versions of the harness.
        return [one["source"] for one in head[name]] if name == "candidates" else head.get(name)

    @property
    def untouched(self) -> tuple[str, ...] | None:
        found = self.head.get("untouched")  # not in a record of an older version of the harness
        return None if found is None else tuple(found)

    def steps(self) -> tuple[Step, ...]:
        """Return the boots to keep: those that the host spoiled are tried again."""
        steps = (Step(**{**step, "fate": ReleaseResult(step["fate"])}) for step in self.head["steps"])
        return tuple(step for step in steps if step.fate is not ReleaseResult.INFRA)


@dataclass(frozen=True, kw_only=True)
class UnfinishedThreshold(_Unfinished):
    """A search of the shortest crashing prompt on disk."""

    what = "search"
    must_not_change = ("status", "harness_version", "low", "high", "guess")

    def boots(self) -> tuple[Boot, ...]:
        """Return the boots to keep: one without an answer is tried again."""
        return tuple(
            Boot(**{**boot, "outcome": Outcome(boot["outcome"]), "probes": tuple(map(_probe, boot["probes"]))})
            for boot in self.head["boots"]
            if boot["probes"]
        )


def _probe(fields: Mapping[str, Any]) -> Probe:
    return Probe(**{**fields, "answer": Answer(fields["answer"])})


def read_run(folder: Path) -> UnfinishedRun:
    """Read an interrupted run. Raises `UsageError` if there is no journal in `folder`, or one of a finished run."""
    with legible(folder):
        return unfinished_run(read(folder / "journal.jsonl"), folder.resolve())


def unfinished_run(recording: Recording, folder: Path) -> UnfinishedRun:
    """Like `read_run`, from a journal that is read already."""
    started = head_of(recording, folder, hint="start a new run")
    ended = recording.end
    if ended is not None and not ended["interrupted"]:
        raise UsageError(f"the run in {folder} is finished", hint=f"again: {started['reproduce']}")
    words = shlex.split(started["reproduce"])
    if words[1:2] != ["run"]:
        raise UsageError(f"the run in {folder} belongs to another command", hint=f"again: {started['reproduce']}")
    expected = {arm["name"]: Expected(arm["expected"]) for arm in started["arms"]}
    boots = Boots()
    for entry in recording.of("trial-ended"):
        arm, outcome = entry["arm"], Outcome(entry["outcome"])
        if outcome is not Outcome.CANCELLED:
            boots.finish(arm, expected[arm], outcome, entry["during"], crossed=entry["trigger"]["crossed"])
    for entry in recording.of("trial-started"):
        boots.last[entry["arm"]] = max(boots.last[entry["arm"]], entry["trial"])
    return UnfinishedRun(folder=folder, words=tuple(words[words.index("run") :]), head=started.fields, boots=boots)


def read_map(folder: Path) -> UnfinishedMap:
    """Read the version map in `folder`. Raises `UsageError` without one."""
    with _readable(folder, "version map", "versions"):
        head, words = _record(folder / "versions.json", "versions")
        found = UnfinishedMap(folder=folder.resolve(), words=words, head=head)
        if not all({"version", "run"} <= row.keys() for row in head["rows"]) or not found.versions:
            raise ValueError("its rows are incomplete")
    return found


def read_bisection(folder: Path) -> UnfinishedBisection:
    """Read the bisection in `folder`. Raises `UsageError` without one."""
    with _readable(folder, "bisection", "bisect"):
        head, words = _record(folder / "bisection.json", "bisect")
        found = UnfinishedBisection(folder=folder.resolve(), words=words, head=head)
        found.steps()
    return found


def read_threshold(folder: Path) -> UnfinishedThreshold:
    """Read the search in `folder`. Raises `UsageError` without one."""
    with _readable(folder, "search", "threshold"):
        head, words = _record(folder / "threshold.json", "threshold")
        found = UnfinishedThreshold(folder=folder.resolve(), words=words, head=head)
        found.boots()
    return found


def _record(path: Path, verb: str) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the content of a JSON file, and the command line in it from the verb on."""
    head = json.loads(path.read_text(encoding="utf-8"))
    # The command is redacted: it names folders by `$HOME` and relative to where it was called.
    words = shlex.split(os.path.expandvars(head["reproduce"]))
    return head, tuple(words[words.index(verb) :])


@contextmanager
def _readable(folder: Path, what: str, verb: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{folder} holds no {what} that can be read: {error}",
            hint=f"name a folder such as reports/SCENARIO/{verb}/latest",
        ) from error
