"""Interrupted version maps and searches, and what is left of them to do. Pure, apart from reading their files.

A map resumes by looking at the runs that it names: a release whose run finished is not run again. A search keeps its boots.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_repro.conversion import convert
from vllm_repro.errors import UsageError
from vllm_repro.report.build import build
from vllm_repro.report.model import RunReport
from vllm_repro.running.resume import Unfinished
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_search.bisect.record import Step
from vllm_repro_search.minimize import record as minimize
from vllm_repro_search.threshold import record as threshold

__all__ = ["UnfinishedMap", "UnfinishedSearch", "read_map", "read_search"]


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
