"""Loop of a search that boots servers one after the other: its limits, and its record after each.

A plan is a pure function of the boots so far, so a resumed search needs only their list. A death is
proof; a clean boot, or a complete answer to one prompt, is evidence; nothing else counts.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from vllm_repro.journal.redact import Redactor
from vllm_repro.releases.sources import Source
from vllm_repro.report.files import write_file
from vllm_repro.report.model import RunReport
from vllm_repro.running.folders import private_sources, redactor, stamped_folder
from vllm_repro.running.job import Job, SiteFacts, first_line
from vllm_repro.running.run import run_one
from vllm_repro.running.terminal import Progress
from vllm_repro.scenario.scenario import Arm
from vllm_repro_search.record import SearchRecord
from vllm_repro_search.resume import UnfinishedSearch

__all__ = ["BootSearch"]

Found = TypeVar("Found", bound=SearchRecord)
Next = TypeVar("Next")


class BootSearch(ABC, Generic[Found, Next]):
    """A search that boots. `found` is all that it knows.

    verb: its folder is `<scenario>/<verb>/<id>/`. file: the name of its record there, as JSON and Markdown.
    """

    verb: ClassVar[str]
    file: ClassVar[str]

    def __init__(self, job: Job, found: Found) -> None:
        self.job = job
        self._progress = Progress()
        self._redactor = redactor(job.scenario)
        self.found: Found = replace(found, reproduce=self._redactor.command(found.reproduce))
        self._folder: Path | None = None
        self._announce: Callable[[str], None] | None = None
        self._kept = 0
        """Boots of an earlier call."""
        self._most_boots: int | None = None
        self._lock = threading.RLock()
        """Of `found` and the folder: boots side by side are threads."""

    @staticmethod
    @abstractmethod
    def as_dict(found: Any, /) -> Mapping[str, Any]:
        """Return the content of the JSON file."""

    @staticmethod
    @abstractmethod
    def as_markdown(found: Any, /) -> str:
        """Return the content of the Markdown file."""

    @abstractmethod
    def _next(self) -> Next | None:
        """Return what to boot, None if the search is over."""

    @abstractmethod
    def _boot(self, chosen: Next) -> str | None:
        """Boot it and add what was seen to `found`. Return the signal that interrupted the run; then nothing is added."""

    def _answered(self) -> list[bool]:
        """Return for each boot if it gave an answer, for a search that does not choose something else after one without."""
        return []

    def _sources(self) -> list[Source | None]:
        """Return a source of each folder that the search takes a vLLM from."""
        return [self.job.options.vllm]

    def _boot_arm(self, arm: Arm) -> RunReport:
        """Run one boot of `arm` below the folder of this verb: `history` must not take it for a run of the scenario's own workload."""
        out = self.job.out / self.job.scenario.id / self.verb
        job = replace(self.job, out=out, arms=[arm], reproduce=self.found.reproduce)
        return run_one(job, self._progress, self._chosen)

    def resume(self, unfinished: UnfinishedSearch) -> None:
        """Continue in the folder of `unfinished`. Raises `UsageError` if this is another search."""
        unfinished.refuse_changed(json.loads(self._record()))
        self._folder = unfinished.folder
        self.found = replace(self.found, **unfinished.kept)
        self._kept = len(self.found.boots)

    def run(self, most_boots: int | None, most_seconds: float | None, announce: Callable[[str], None]) -> Path:
        """Boot until the search is over or a limit is reached, and return its folder; `found` is what is known then.

        most_boots: also counts boots of an earlier call. most_seconds: of this call. announce: called once with the first output line.
        Raises `UsageError`, `InfraError` or `Unsupported` if no server can be had.
        """
        self._announce, self._most_boots = announce, most_boots
        began, before, stopped = time.monotonic(), self.found.duration_s, None
        try:
            while stopped is None and (chosen := self._next()) is not None:
                if most_boots is not None and len(self.found.boots) >= most_boots:
                    stopped = f"--max-boots {most_boots}"
                elif most_seconds is not None and time.monotonic() - began >= most_seconds:
                    stopped = f"--max-time {most_seconds:g}s"
                elif self._answered()[self._kept :][-2:] == [False, False]:
                    stopped = "two boots in a row without an answer"
                else:
                    stopped = self._boot(chosen)
                self._save(stopped, before + time.monotonic() - began)
        except KeyboardInterrupt as signal:
            # Between two runs, or in an install; a run takes the signals itself and reports what it saw.
            stopped = f"{signal}" or "SIGINT"
        return self._save(stopped, before + time.monotonic() - began)

    def _chosen(self, site: SiteFacts, why: str) -> None:
        with self._lock:
            announce, self._announce = self._announce, None
            if announce is not None:
                if not self.found.boots:
                    self.found = replace(self.found, evidence=site.evidence.value)
                announce(first_line(site, why, None))
                if self._folder is None:  # so that one that is killed in its first boot can be resumed
                    self._save(None, 0.0)

    def _save(self, stopped: str | None, duration_s: float) -> Path:
        with self._lock:
            self.found = replace(self.found, stopped=stopped, duration_s=round(duration_s, 1))
            if self._folder is None:  # not before there is a server: a refused command must leave no folder
                self._folder = stamped_folder(self.job.out, Path(self.found.scenario) / self.verb)
            hint = "free some space, or name another --out"
            write_file(self._folder / f"{self.file}.json", self._record(), hint=hint)
            text = Redactor(private_sources(self._sources())).text(self._redactor.text(self.as_markdown(self.found)))
            write_file(self._folder / f"{self.file}.md", text, hint=hint)
            return self._folder

    def _record(self) -> str:
        return json.dumps(self._redactor.deep(self.as_dict(self.found)), indent=2, ensure_ascii=False) + "\n"
