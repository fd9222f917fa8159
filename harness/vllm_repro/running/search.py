"""Loop of a search that boots servers one after the other: its limits, and its record on disk after each boot."""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from vllm_repro.journal.redact import Redactor, known_secrets
from vllm_repro.report.bisection import Bisection
from vllm_repro.report.files import write_file
from vllm_repro.report.threshold import Threshold
from vllm_repro.running.folders import private_folders, private_hosts, stamped_folder
from vllm_repro.running.job import Job, first_line
from vllm_repro.running.resume import UnfinishedBisection, UnfinishedThreshold
from vllm_repro.running.terminal import Progress
from vllm_repro.servers.site import Site

__all__ = ["BootSearch"]

Found = TypeVar("Found", Bisection, Threshold)
Next = TypeVar("Next")


class BootSearch(ABC, Generic[Found, Next]):
    """A search that boots. `found` is all that it knows.

    verb: its folder is `<scenario>/<verb>/<id>/`. file: the name of its record there, as JSON and Markdown.
    """

    verb: ClassVar[str]
    file: ClassVar[str]

    def __init__(self, job: Job, found: Found, announce: Callable[[str], None]) -> None:
        self._job, self._announce, self._out = job, announce, job.out
        self._progress = Progress()
        self._redactor = Redactor(private_folders(), private_hosts(job.scenario), known_secrets(os.environ))
        self.found: Found = replace(found, reproduce=self._redactor.command(found.reproduce))
        self._folder: Path | None = None
        self._announced = False

    @abstractmethod
    def _next(self) -> Next | None:
        """Return what to boot, None if the search is over."""

    @abstractmethod
    def _boot(self, chosen: Next) -> str | None:
        """Boot it and add what was seen to `found`. Return the signal that interrupted the run; then nothing is added."""

    @abstractmethod
    def _boots(self) -> int:
        """Return the number of boots, those of an earlier call included."""

    @abstractmethod
    def _json(self) -> Mapping[str, Any]:
        """Return the content of the JSON file."""

    @abstractmethod
    def _markdown(self) -> str:
        """Return the content of the Markdown file."""

    def _hopeless(self) -> str | None:
        """Return why no further boot would help."""
        return None

    def resume(self, unfinished: UnfinishedBisection | UnfinishedThreshold, **kept: Any) -> None:
        """Continue in the folder of `unfinished`. kept: what it found. Raises `UsageError` if this is another search."""
        unfinished.refuse_changed(json.loads(self._record()))
        self._folder = unfinished.folder
        old = {name: unfinished.head[name] for name in ("evidence", "started_at", "duration_s")}
        self.found = replace(self.found, **old, **kept)

    def run(self, most_boots: int | None, most_seconds: float | None) -> tuple[Found, Path]:
        """Boot until the search is over or a limit is reached, and return what was found and its folder.

        most_boots: also counts boots of an earlier call. most_seconds: of this call.
        """
        began, before, stopped = time.monotonic(), self.found.duration_s, None
        try:
            while stopped is None and (chosen := self._next()) is not None:
                if most_boots is not None and self._boots() >= most_boots:
                    stopped = f"--max-boots {most_boots}"
                elif most_seconds is not None and time.monotonic() - began >= most_seconds:
                    stopped = f"--max-time {most_seconds:g}s"
                else:
                    stopped = self._hopeless() or self._boot(chosen)
                self._save(stopped, before + time.monotonic() - began)
        except KeyboardInterrupt as signal:
            # Between two runs, or in an install; a run takes the signals itself and reports what it saw.
            stopped = f"{signal}" or "SIGINT"
        folder = self._save(stopped, before + time.monotonic() - began)
        return self.found, folder

    def _chosen(self, site: Site, why: str) -> None:
        if not self._announced:
            self._announced = True
            if not self._boots():
                self.found = replace(self.found, evidence=site.evidence.value)
            self._announce(first_line(site, why, None))
            if self._folder is None:  # so that one that is killed in its first boot can be resumed
                self._save(None, 0.0)

    def _save(self, stopped: str | None, duration_s: float) -> Path:
        self.found = replace(self.found, stopped=stopped, duration_s=round(duration_s, 1))
        if self._folder is None:  # not before there is a server: a refused command must leave no folder
            self._folder = stamped_folder(self._out, Path(self.found.scenario) / self.verb)
        hint = "free some space, or name another --out"
        write_file(self._folder / f"{self.file}.json", self._record(), hint=hint)
        write_file(self._folder / f"{self.file}.md", self._redactor.text(self._markdown()), hint=hint)
        return self._folder

    def _record(self) -> str:
        return json.dumps(self._redactor.deep(self._json()), indent=2, ensure_ascii=False) + "\n"
