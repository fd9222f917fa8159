"""A version map that is gone on with: what it was made with, and which of its releases need no boot. Pure, apart from reading its files."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_repro.errors import UsageError
from vllm_repro.report.build import build
from vllm_repro.report.model import RunReport
from vllm_repro.report.version_map import VersionMap
from vllm_repro.verdict.outcome import Outcome

__all__ = ["KeptMap", "read_kept"]

SAME = ("status", "harness_version")
"""What a map and its second part must have in common to be one map, beside the words that it was made with."""


@dataclass(frozen=True)
class KeptMap:
    """words: what `vllm-repro` was called with, from the verb on. head: its `versions.json`. runs: by release, the folder of its run."""

    folder: Path
    words: tuple[str, ...]
    head: Mapping[str, Any]
    runs: Mapping[str, Path]

    @property
    def out(self) -> Path:
        """Where its runs are written."""
        return self.folder.parents[2]

    @property
    def versions(self) -> tuple[str, ...]:
        return tuple(self.head["versions"])

    def report(self, version: str) -> RunReport | None:
        """The run of a release that came to its end; None where there is none, or where the host had trouble in it."""
        folder = self.runs.get(version)
        if folder is None or not (folder / "journal.jsonl").exists():
            return None
        report = build(folder)
        troubled = any(trial.outcome is Outcome.INFRA for arm in report.arms for trial in arm.trials)
        return None if report.shortfall or troubled else report

    def refuse_other(self, other: VersionMap) -> None:
        """Raises `UsageError` where the rows of `other` would be no rows of this map."""
        now = other.as_json()
        for name in SAME:
            if now[name] != self.head[name]:
                raise UsageError(
                    f"the map in {self.folder} cannot be gone on with: its {name.replace('_', ' ')} has changed since",
                    hint="make it anew; the runs that it names stay where they are",
                )


def read_kept(folder: Path) -> KeptMap:
    """The map in `folder`. Raises `UsageError` where there is none."""
    try:
        head = json.loads((folder / "versions.json").read_text(encoding="utf-8"))
        # Its folders are told as a report tells them: by `$HOME`, and from where the command was called.
        words = shlex.split(os.path.expandvars(head["reproduce"]))
        rows = {row["version"]: row["run"] for row in head["rows"] if row["run"]}
        kept = KeptMap(folder.resolve(), tuple(words[words.index("versions") :]), head, {})
        runs = {version: kept.out / head["scenario"] / run for version, run in rows.items()}
        return KeptMap(kept.folder, kept.words, head, runs)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{folder} holds no version map that can be read: {error}",
            hint="name a folder with versions.json in it, such as reports/SCENARIO/versions/latest",
        ) from error
