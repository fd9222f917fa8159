"""`vllm-repro versions`: the version map, a run of the scenario on each of several releases."""

from __future__ import annotations

import argparse
import os
from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from msgspec import structs
from packaging.version import Version

from vllm_repro.cli.common import add_common
from vllm_repro.cli.options import add_run_options, job_from
from vllm_repro.cli.server_options import add_server_options, server_options
from vllm_repro.errors import InfraError, ReproError, Unsupported, UsageError
from vllm_repro.releases.known import RELEASES
from vllm_repro.releases.sources import WITH, Source, existing_path, parse_source, version_of
from vllm_repro.releases.versions import release_version
from vllm_repro.report.build import build
from vllm_repro.report.model import RunReport
from vllm_repro.running.job import Job, choice_of, refuse_unused_options, repeat_command
from vllm_repro.running.run import run_one
from vllm_repro.scenario.catalogue import find_arms
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.servers.docker_engine import connect
from vllm_repro.servers.options import ServerOptions
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_search.boot_search import (
    BootSearch,
    UnfinishedSearch,
    common_fields,
    named_scenario,
    run_search,
    stream_of,
    with_resumed,
)
from vllm_repro_search.versions.record import (
    ReleaseResult,
    ReleaseRow,
    VersionMap,
    row_of,
    row_without_run,
)

_EPILOG = """

exit status:
  0  every release did what the scenario declares; one that the status does
     not mention may have the bug or not
  1  a surprise: a release that is declared bad lives, or one that is declared
     good dies
  2  undecided: a release that could not be tried, did not boot, or did not
     cross the boundary
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted

Each release is a run with a folder of its own. The map is rewritten after each in
OUT/SCENARIO/versions/, as versions.json and versions.md, so an interrupted map keeps its rows.
--resume continues it in a new folder."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm-repro versions`."""
    add_common(
        parser,
        example=(
            "vllm-repro versions tq-chunked-prefill --server lab --versions 0.21.0,0.23.0,0.24.0"
        ),
        prints="the content of versions.json",
        more=_EPILOG,
    )
    parser.add_argument(
        "scenario", nargs="?", metavar="SCENARIO", help="may be left out with --resume"
    )
    parser.add_argument(
        "--versions",
        metavar="A,B,...",
        help=(
            "the releases, separated by commas (default: those at which the scenario's status"
            " changes)"
        ),
    )
    add_server_options(
        parser,
        names=("server", "model", "weights", "patch"),
        patch="; each one given is an arm beside the release as it is",
    )
    parser.add_argument(
        "--image",
        metavar="I",
        help="the image to run, with {version} in place of the release (default: the official one)",
    )
    parser.add_argument(
        "--with",
        dest="packages",
        action="append",
        metavar="PACKAGE",
        help=(
            "exchange or add a package of each release, as `run --with` does; PACKAGE=A,B,... maps"
            " those versions of it"
        ),
    )
    add_run_options(
        parser,
        arm="this arm instead of the first; may be given again",
        on="its releases side by side",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="MAP",
        help=(
            "continue the map in this folder with its options: finished releases are not run again,"
            " --versions adds releases"
        ),
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `vllm-repro versions`: one run per release, and the map; return the exit status."""
    added = arguments.versions
    arguments, unfinished = with_resumed(arguments, VersionMap, beside=("versions",))
    if unfinished is not None:
        # The map names folders of packages by `$HOME`.
        known = map(os.path.expandvars, unfinished.head["versions"])
        arguments.versions = ",".join((*known, *(releases(added) if added else ())))
    scenario = named_scenario(arguments, "versions")
    options = server_options(arguments)
    if arguments.versions is not None:
        versions = releases(arguments.versions)
    elif choice_of(scenario, options).kind.facts.in_lab and scenario.lab and scenario.lab.vllm:
        versions = (scenario.lab.vllm,)  # those of the status cannot be installed
    else:
        versions = status_bounds(scenario)
    if arguments.packages:
        versions = with_each(versions, arguments.packages)
    sources = [parse_source(version) for version in versions]
    job = job_of_releases(arguments, scenario, options, sources)
    if job.trials is None:
        raise UsageError("a map needs as many boots of each release", hint="--trials N")
    if arguments.versions is None:
        print(
            f"No --versions: the releases where the status of {scenario.id} changes"
            f" ({scenario.status}), and the one that it is tried with: {', '.join(versions)}.",
            file=stream_of(arguments),
            flush=True,
        )
    record = VersionMap(
        **common_fields(
            job,
            repeat_command("versions", job, job.choice.kind, ("--versions", ",".join(versions))),
        ),
        arms=tuple(arm.name for arm in job.arms),
        trials=arguments.trials,
        versions=versions,
    )
    return run_search(arguments, ReleaseSweep(job, record, sources), unfinished)


def job_of_releases(
    arguments: argparse.Namespace,
    scenario: Scenario,
    options: ServerOptions,
    sources: Sequence[Source],
) -> Job:
    """Return the job of a search over releases.

    `--server auto` is resolved here: results of different kinds of server are not comparable.
    sources: the vLLMs; `auto` chooses by the first. Raises `UsageError`, also for an image that
    would be the same for every release, and for a vLLM that the server cannot run.
    """
    if options.image and VERSION not in options.image:
        raise UsageError(
            f"every release would run {options.image}",
            hint=f"write {VERSION} where its tag has the release",
        )
    choice = choice_of(scenario, for_release(options, sources[0]))
    for source in sources:
        if source.base:  # a release that is refused is a row
            refuse_unused_options(for_release(options, source), choice.kind)
    if choice.kind.facts.container and not arguments.on:
        connect().close()  # fail now if no engine answers, instead of once per release
    names = arguments.arm or [arm.name for arm in scenario.leading]
    job = job_from(
        arguments,
        name=arguments.scenario,
        scenario=scenario,
        options=replace(options, server=choice.kind.value),
        choice=choice,
        arms=find_arms(scenario, names),
        compared=bool(options.patch),
    )
    return replace(job, named_arms=names)  # so that each run is repeated with these arms


def releases(text: str) -> tuple[str, ...]:
    """Return the releases of `0.23.0,v0.21,0.23.0`, sorted, each once.

    Raises `UsageError`, also for a range: without a list of all releases, one that is missing would
    look as if it had been tried.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UsageError("--versions names no release", hint="--versions 0.23.0,0.24.0")
    for word in words:
        first, dash, last = word.partition("-")
        if dash and all(end.strip().removeprefix("v")[:1].isdigit() for end in (first, last)):
            raise UsageError(
                f"--versions takes no range such as {word}", hint="name each release: 0.23.0,0.24.0"
            )
    return _sorted(map(_published, words))


def with_each(versions: Sequence[str], packages: Sequence[str]) -> tuple[str, ...]:
    """Return the vLLMs of a map: each of `versions` with each version of each package.

    packages: of `--with`. Raises `UsageError` for a text that names no package.
    """
    choices = [_each_version(package) for package in packages]
    combined = [WITH.join(words) for words in product(versions, *choices)]
    return _sorted(f"{parse_source(text)}" for text in combined)


def _each_version(package: str) -> list[str]:
    """Return `a==1` and `a==2` for `a=1,2`; any other text as it is."""
    name, _, listed = package.partition("=")
    if not listed or listed.startswith("=") or existing_path(package):
        return [package]
    return [f"{name}=={version.strip()}" for version in listed.split(",")]


def _published(text: str) -> str:
    """Like `published_release`, for a release that may have packages exchanged.

    Paths of packages become absolute. Raises `UsageError` also for a text that names no package.
    """
    release, *packages = text.split(WITH)
    return f"{parse_source(WITH.join((published_release(release), *packages)))}"


def published_release(text: str) -> str:
    """Return the full number of a release: `v0.28` gives `0.28.0`, like `release_version`.

    Raises `UsageError` also for one that was never published.

    Only final releases between the oldest and the newest of the list are checked.
    """
    known, requested = [*map(Version, RELEASES)], Version(version := release_version(text))
    place = bisect(known, requested)
    if (
        requested not in known
        and 0 < place < len(known)
        and not requested.is_prerelease
        and not requested.is_postrelease
    ):
        hint = f"the releases next to it are {known[place - 1]} and {known[place]}"
        raise UsageError(f"there is no vLLM {version}", hint=hint)
    return version


def status_bounds(scenario: Scenario) -> tuple[str, ...]:
    """Return the first bad release, the scenario's `try_with` and the first good one, sorted.

    Each is there once; the status may lack the first or the last.
    """
    status = scenario.status
    return _sorted(filter(None, (status.first_bad, scenario.try_with, status.first_good)))


def _sorted(versions: Iterable[str]) -> tuple[str, ...]:
    """Return the versions from old to new, each once; then by the versions of packages."""

    def age(text: str) -> tuple[Version, list[tuple[str, Version]]]:
        release, *packages = text.split(WITH)
        parts = [package.partition("==") for package in packages]
        return Version(release), [
            (name, version_of(version) or Version("0")) for name, _, version in parts
        ]

    return tuple(sorted(set(versions), key=age))


VERSION = "{version}"
"""Placeholder for the release in `--image`."""


def for_release(options: ServerOptions, source: Source) -> ServerOptions:
    """Return the server options with this vLLM as their source, also in the image's name."""
    image = options.image and options.image.replace(VERSION, f"{source}")
    return replace(options, vllm=source, image=image)


def run_release(search: BootSearch[Any, Any], source: Source) -> tuple[ReleaseRow, str | None]:
    """Run the job of a search on one vLLM; return its row, and the signal that interrupted it.

    If `InfraError` or `Unsupported` is raised, print it and return the row that says so.
    """
    job = replace(search.job, options=for_release(search.job.options, source))
    if job.compared:  # `run` with one patch is another command
        job = replace(
            job, reproduce=repeat_command("versions", job, job.choice.kind, ("--versions", source))
        )
    try:
        report = run_one(job, search.progress, search.server_chosen)
    except (InfraError, Unsupported) as error:
        return row_of_error(search, source, error), None
    return _row_of_run(search, source, report)


def _row_of_run(
    search: BootSearch[Any, Any], source: Source, report: RunReport
) -> tuple[ReleaseRow, str | None]:
    """Return the row of a run of one vLLM, and the signal that interrupted the run."""
    standing = search.job.scenario.status.standing(source.version)
    row = row_of(report, source.version, standing, search.record.evidence)
    return structs.replace(row, version=f"{source}"), report.interrupted


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
    """Search that runs the scenario on each release, and records the results in a version map.

    It runs all releases at once on a cluster, else one after the other.
    """

    def __init__(self, job: Job, record: VersionMap, sources: Sequence[Source]) -> None:
        super().__init__(job, record)
        self._sources = sources
        self._unfinished: UnfinishedSearch | None = None
        # releases that the server kind refuses; the command is wrong if it refuses all of them
        self._refused: set[str] = set()

    def sources(self) -> Sequence[Source]:
        """Return the vLLMs of the map, some with packages of folders that text must not name."""
        return self._sources

    def resume(self, unfinished: UnfinishedSearch) -> None:
        """Take over the finished runs of an earlier map; this one has a folder of its own."""
        unfinished.refuse_changed(self.record.as_dict())
        self.record = structs.replace(self.record, **unfinished.fields())
        self._unfinished = unfinished

    def next(self) -> Sequence[str]:
        """Return the releases to run next: all that are left on a cluster, else one."""
        return self.record.pending if self.job.elsewhere else self.record.pending[:1]

    def answer_after(self, boot: ReleaseRow, *, several: bool) -> str:
        """Return an empty text: the run has printed its own result."""
        return ""

    def describe(self, item: str, number: int) -> str:
        """Return the progress line of a release that begins."""
        return f"{item} ({number} of {len(self.record.versions)})"

    def boot(self, item: str) -> tuple[ReleaseRow, str | None]:
        """Run a release, or take its finished run; return its row, and an interrupting signal.

        Raises `UsageError` only if the server refuses all releases; one refused release gets a row.
        """
        source = parse_source(item)
        if (finished := self._finished_run(item)) is not None:
            self.progress.line(f"  as in {finished.folder.name}")
            return _row_of_run(self, source, finished)
        try:
            return run_release(self, source)
        except UsageError as error:
            self._refused.add(item)
            if len(self._refused) == len(self.record.versions):
                raise
            return row_of_error(self, source, error), None

    def _finished_run(self, version: str) -> RunReport | None:
        """Return the run of a release in the map that is resumed; None if it must be run.

        That is if it is unfinished, the host spoiled it, or a patch has changed since.
        """
        if self._unfinished is None:
            return None
        rows = self._unfinished.record.boots
        redacted = self.redactor.text(version)
        run = next((row.run for row in rows if row.version == redacted), None)
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
        """Write the map and return its folder; write none while all tried releases are refused."""
        tried = {row.version for row in self.record.boots}
        if tried and tried <= self._refused and len(tried) < len(self.record.versions):
            return self.job.out
        return super().save(stopped, duration_s)
