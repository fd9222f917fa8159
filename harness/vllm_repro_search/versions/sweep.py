"""Sweep of one scenario over releases: a run for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import structs

from vllm_repro.errors import InfraError, ReproError, Unsupported, UsageError
from vllm_repro.releases.sources import Source
from vllm_repro.report.build import build
from vllm_repro.report.model import RunReport
from vllm_repro.running.job import Job, repeat_command
from vllm_repro.running.run import run_one
from vllm_repro.servers.options import ServerOptions
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_search.boot_search import BootSearch, UnfinishedSearch
from vllm_repro_search.versions.record import (
    ReleaseResult,
    ReleaseRow,
    VersionMap,
    row_of,
    row_without_run,
)

__all__ = ["VERSION", "ReleaseSweep", "for_release", "row_of_error", "run_release"]

VERSION = "{version}"
"""Placeholder for the release in `--image`."""


def for_release(options: ServerOptions, source: Source) -> ServerOptions:
    """Return the options of the run of one release, or of another vLLM."""
    image = options.image and options.image.replace(VERSION, f"{source}")
    return replace(options, vllm=source, image=image)


def run_release(search: BootSearch[Any, Any], source: Source) -> RunReport | ReleaseRow:
    """Run the job of a search on one release; return its report, or a row without a server."""
    job = replace(search.job, options=for_release(search.job.options, source))
    if job.compared:  # `run` with one patch is another command
        job = replace(
            job, reproduce=repeat_command("versions", job, job.choice.kind, ("--versions", source))
        )
    try:
        return run_one(job, search.progress, search.chosen)
    except (InfraError, Unsupported) as error:
        return row_of_error(search, source, error)


def row_of_error(search: BootSearch[Any, Any], source: Source, error: ReproError) -> ReleaseRow:
    """Print why there is no server for a release, and return its row."""
    infra = isinstance(error, InfraError)
    # An unsupported release is a result: its hint is for a run of that release alone.
    search.progress.line(f"  {error}" + (f"\n  next: {error.hint}" if infra and error.hint else ""))
    fate = ReleaseResult.INFRA if infra else ReleaseResult.UNSUPPORTED
    return row_without_run(
        f"{source}", search.job.scenario, search.job.arms, fate, search.redactor.text(str(error))
    )


class ReleaseSweep(BootSearch[VersionMap, str]):
    """Version map: one run for each release, side by side on a cluster.

    `resume` takes over finished runs.
    """

    shows_answer = False

    def __init__(self, job: Job, record: VersionMap) -> None:
        super().__init__(job, record)
        self._unfinished: UnfinishedSearch | None = None
        # releases that the server kind refuses; the command is wrong if it refuses all of them
        self._refused: set[str] = set()

    def resume(self, unfinished: UnfinishedSearch) -> None:
        unfinished.refuse_changed(self.record.as_dict())
        self.record = structs.replace(self.record, **unfinished.fields())
        self._unfinished = unfinished

    def next(self) -> Sequence[str]:
        return self.record.pending if self.job.elsewhere else self.record.pending[:1]

    def describe(self, item: str, number: int) -> str:
        return f"{item} ({number} of {len(self.record.versions)})"

    def boot(self, item: str) -> tuple[ReleaseRow, str | None]:
        result: RunReport | ReleaseRow | None = self._finished_run(item)
        if isinstance(result, RunReport):
            self.progress.line(f"  as in {result.folder.name}")
        else:
            result = self._run(item)
        if isinstance(result, ReleaseRow):
            return result, None
        standing = self.job.scenario.status.standing(item)
        return row_of(result, item, standing, self.record.evidence), result.interrupted

    def _run(self, version: str) -> RunReport | ReleaseRow:
        try:
            return run_release(self, Source(release=version))
        except UsageError as error:
            self._refused.add(version)
            if len(self._refused) == len(self.record.versions):
                raise
            return row_of_error(self, Source(release=version), error)

    def _finished_run(self, version: str) -> RunReport | None:
        """Return the run of a release in the map that is resumed, unless it must be repeated."""
        if self._unfinished is None:
            return None
        rows = self._unfinished.record.boots
        run = next((row.run for row in rows if row.version == version), None)
        folder = self.job.out / self.record.scenario / (run or "")
        if run is None or not (folder / "journal.jsonl").exists():
            return None
        report = build(folder)
        troubled = any(
            trial.outcome is Outcome.INFRA for arm in report.arms for trial in arm.trials[-1:]
        )
        # a diff may have changed since
        changed = [arm.patches for arm in report.arms] != [arm.patches for arm in self.job.arms]
        return None if report.shortfall or troubled or changed else report

    def save(self, stopped: str | None, duration_s: float) -> Path:
        tried = {row.version for row in self.record.boots}
        if tried and tried <= self._refused and len(tried) < len(self.record.versions):
            return self.job.out
        return super().save(stopped, duration_s)
