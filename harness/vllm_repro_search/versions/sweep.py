"""Sweep of one scenario over releases: a run for each, and the version map on disk after each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from vllm_repro import __version__
from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.journal.redact import Redactor
from vllm_repro.releases.sources import Source
from vllm_repro.report.files import write_file
from vllm_repro.report.model import RunReport
from vllm_repro.running.elsewhere import results
from vllm_repro.running.folders import redactor, stamped_folder
from vllm_repro.running.job import Chosen, Job, SiteFacts, first_line, repeat_command
from vllm_repro.running.run import run_one
from vllm_repro.running.terminal import Progress
from vllm_repro.servers.options import ServerOptions
from vllm_repro_search.resume import UnfinishedMap
from vllm_repro_search.versions.json_map import version_map_dict
from vllm_repro_search.versions.map_page import map_page
from vllm_repro_search.versions.release_result import ReleaseResult
from vllm_repro_search.versions.version_map import ReleaseRow, VersionMap, markdown, row_of, row_without_run

__all__ = ["VERSION", "for_release", "map_releases", "run_release"]

VERSION = "{version}"
"""Placeholder for the release in `--image`."""


def for_release(options: ServerOptions, source: Source) -> ServerOptions:
    """Return the options of the run of one release, or of another vLLM."""
    image = options.image and options.image.replace(VERSION, f"{source}")
    return replace(options, vllm=source, image=image)


def run_release(
    job: Job, source: Source, progress: Progress, chosen: Chosen, redactor: Redactor
) -> RunReport | ReleaseRow:
    """Run `job` on one release. Return a row without a run if there is no server for it."""
    job = replace(job, options=for_release(job.options, source))
    if job.compared:  # `run` with one patch is another command
        job = replace(job, reproduce=repeat_command("versions", job, job.choice.kind, ("--versions", source)))
    try:
        return run_one(job, progress, chosen)
    except (InfraError, Unsupported) as error:
        infra = isinstance(error, InfraError)
        # An unsupported release is a result: its hint is for a run of that release alone.
        progress.line(f"  {error}" + (f"\n  next: {error.hint}" if infra and error.hint else ""))
        result = ReleaseResult.INFRA if infra else ReleaseResult.UNSUPPORTED
        return row_without_run(f"{source}", job.scenario, job.arms, result, redactor.text(str(error)))


def map_releases(
    job: Job, versions: Sequence[str], announce: Callable[[str], None], unfinished: UnfinishedMap | None = None
) -> tuple[VersionMap, Path]:
    """Run `job` on each release and return the map, finished or interrupted, and its folder.

    announce: called once with the first output line. unfinished: a map whose finished runs are taken over. Raises `UsageError`.
    """
    return _Sweep(job, versions, announce, unfinished).run()


class _Sweep:
    def __init__(
        self, job: Job, versions: Sequence[str], announce: Callable[[str], None], unfinished: UnfinishedMap | None
    ) -> None:
        if job.trials is None:
            raise UsageError("a map needs as many boots of each release", hint="--trials N")
        self._job, self._announce, self._unfinished = job, announce, unfinished
        self._progress = Progress()
        self._redactor = redactor(job.scenario)
        self._started = time.time()
        self._folder: Path | None = None
        self._announced = False
        scenario, kind = job.scenario, job.choice.kind
        self._map = VersionMap(
            scenario=scenario.id,
            issue=scenario.issue,
            title=scenario.title,
            status=scenario.status,
            server=kind.value,
            evidence=kind.facts.evidence,
            arms=tuple(arm.name for arm in job.arms),
            trials=job.trials,
            versions=tuple(versions),
            rows=(),
            harness_version=__version__,
            started_at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
            duration_s=0.0,
            reproduce=self._redactor.command(repeat_command("versions", job, kind, ("--versions", ",".join(versions)))),
        )
        if unfinished is not None:
            unfinished.refuse_changed(version_map_dict(self._map))
            self._started -= unfinished.head["duration_s"]
            self._map = replace(
                self._map, evidence=unfinished.head["evidence"], started_at=unfinished.head["started_at"]
            )

    def run(self) -> tuple[VersionMap, Path]:
        try:
            for _, (row, interrupted) in results(self._row, self._map.versions, self._job.elsewhere):
                self._save(self._map.with_row(row), interrupted or self._map.interrupted)
                if interrupted and self._job.elsewhere is None:
                    break
        except KeyboardInterrupt as signal:
            # Between two runs, or in an install; a run takes the signals itself and reports what it saw.
            self._save(self._map, f"{signal}" or "SIGINT")
        assert self._folder is not None, "there is at least one release, and each is saved"
        return self._map, self._folder

    def _row(self, version: str) -> tuple[ReleaseRow, str | None]:
        """Return the row of one release, and the signal that interrupted its run."""
        versions = self._map.versions
        self._progress.line(f"{version} ({versions.index(version) + 1} of {len(versions)})")
        report = self._unfinished.report(version) if self._unfinished else None
        patches = [arm.patches for arm in self._job.arms]
        if report is not None and [arm.patches for arm in report.arms] == patches:  # no diff was changed since
            self._progress.line(f"  as in {report.folder.name}")
            return self._row_of(report, version), None
        found = run_release(self._job, Source(release=version), self._progress, self._chosen, self._redactor)
        if isinstance(found, ReleaseRow):
            return found, None
        return self._row_of(found, version), found.interrupted

    def _row_of(self, report: RunReport, version: str) -> ReleaseRow:
        assert self._map.evidence is not None, "a run has a site, and `_chosen` was called with it"
        return row_of(report, version, self._job.scenario.status.standing(version), self._map.evidence)

    def _chosen(self, site: SiteFacts, why: str) -> None:
        if not self._announced:
            self._announced = True
            self._map = replace(self._map, evidence=site.evidence.value)
            self._announce(first_line(site, why, None))

    def _save(self, version_map: VersionMap, interrupted: str | None) -> None:
        duration = round(time.time() - self._started, 3)
        self._map = replace(version_map, interrupted=interrupted, duration_s=duration)
        if self._folder is None:  # not before: a refused command must leave no folder
            self._folder = stamped_folder(self._job.out, Path(self._map.scenario) / "versions")
        hint = "free some space, or name another --out"
        text = json.dumps(version_map_dict(self._map), indent=2, ensure_ascii=False) + "\n"
        write_file(self._folder / "versions.json", text, hint=hint)
        write_file(self._folder / "versions.md", Redactor().text(markdown(self._map)), hint=hint)
        write_file(self._folder / "versions.html", map_page(self._map), hint=hint)
