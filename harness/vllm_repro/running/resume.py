"""Interrupted runs, version maps and searches, and what is left of them to do. Pure, apart from reading their files.

A run resumes only as it was started: same scenario, machine and servers. Finished boots count; an interrupted boot is repeated under the
next number. A map resumes by looking at the runs that it names: a release whose run finished is not run again. A search keeps
its boots.
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

from vllm_repro.conversion import convert
from vllm_repro.errors import UsageError
from vllm_repro.journal.journal import Recording, head_of, legible, read
from vllm_repro.report import minimize, threshold
from vllm_repro.report.bisection import Step
from vllm_repro.report.build import build
from vllm_repro.report.model import RunReport
from vllm_repro.running.boots import Boots
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected

__all__ = [
    "Unfinished",
    "UnfinishedMap",
    "UnfinishedRun",
    "UnfinishedSearch",
    "read_map",
    "read_run",
    "read_search",
    "unfinished_run",
]


@dataclass(frozen=True, kw_only=True)
class Unfinished:
    """Common part of what can be resumed.

    words: the command line, from the verb on. head: the first line of the journal, or the JSON file. must_not_change: keys of `head`.
    depth: folders between the folder of all runs and this one.
    """

    what: ClassVar[str]
    depth: ClassVar[int] = 2
    must_not_change: Sequence[str]
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
class UnfinishedRun(Unfinished):
    """An interrupted run."""

    what = "run"
    depth = 1
    must_not_change: Sequence[str] = (
        "scenario", "arms", "trigger", "status", "loads", "output", "evidence", "server", "version", "machine", "docker", "harness_version",
    )  # fmt: skip
    boots: Boots


@dataclass(frozen=True, kw_only=True)
class UnfinishedMap(Unfinished):
    """A version map on disk."""

    what = "map"
    must_not_change: Sequence[str] = ("status", "harness_version")

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
class UnfinishedSearch(Unfinished):
    """A bisection or another search on disk. kept: what continues: its boots, but for those that are tried again."""

    what = "search"
    kept: Mapping[str, Any]

    @staticmethod
    def _compared(head: Mapping[str, Any], name: str) -> Any:
        # What else a candidate holds is for the reader, and differs between versions of the harness.
        return [one["source"] for one in head[name]] if name == "candidates" else head.get(name)


_SEARCHES: Mapping[str, tuple[str, str, type, Sequence[str]]] = {
    "bisect": ("bisection.json", "steps", Step, ("candidates", "script")),
    "threshold": ("threshold.json", "boots", threshold.Boot, ("low", "high", "guess")),
    "minimize": ("minimize.json", "boots", minimize.Boot, ("units", "untried")),
}
"""By verb: the file, the key and the type of its boots, and what must not change."""


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
    # After a power cut the journal may lack a boot whose log is there. A new boot must not append to it.
    for log in (folder / "logs").glob("*.log"):
        arm, _, number = log.name.partition(".")[0].rpartition("-")
        if arm in expected and number.isdecimal():
            boots.last[arm] = max(boots.last[arm], int(number))
    return UnfinishedRun(folder=folder, words=tuple(words[words.index("run") :]), head=started.fields, boots=boots)


def read_map(folder: Path) -> UnfinishedMap:
    """Read the version map in `folder`. Raises `UsageError` without one."""
    with _readable(folder, "version map", "versions"):
        head, words = _record(folder / "versions.json", "versions")
        found = UnfinishedMap(folder=folder.resolve(), words=words, head=head)
        if not all({"version", "run"} <= row.keys() for row in head["rows"]) or not found.versions:
            raise ValueError("its rows are incomplete")
    return found


def read_search(folder: Path, verb: str) -> UnfinishedSearch:
    """Read the search of this verb in `folder`. Raises `UsageError` without one."""
    file, key, boot, fixed = _SEARCHES[verb]
    with _readable(folder, "search", verb):
        head, words = _record(folder / file, verb)
        boots: list[Any] = [convert(one, boot) for one in head[key]]
        kept = {
            name: head[name] for name in ("evidence", "started_at", "duration_s", "version", "missing") if name in head
        }
        if head.get("untouched") is not None:
            kept["untouched"] = tuple(head["untouched"])
        return UnfinishedSearch(
            folder=folder.resolve(),
            words=words,
            head=head,
            must_not_change=("status", "harness_version", *fixed),
            kept={**kept, key: tuple(one for one in boots if one.tested)},
        )


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
