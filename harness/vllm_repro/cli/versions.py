"""`vllm-repro versions`: the version map, a run of the scenario on each of several releases."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from packaging.version import Version

from vllm_repro import __version__
from vllm_repro.cli.common import Subparsers, print_json, verb
from vllm_repro.cli.options import add_server_options, server_options
from vllm_repro.cli.resuming import as_begun
from vllm_repro.cli.running import Job, add_run_options, again, choice_of, first_line, job_of, run_one
from vllm_repro.errors import INTERRUPTED, InfraError, Unsupported, UsageError
from vllm_repro.journal.redact import Redactor, known_secrets
from vllm_repro.releases.knowledge import release_version
from vllm_repro.report.files import write_whole
from vllm_repro.report.model import RunReport
from vllm_repro.report.version_map import Row, VersionMap, row_of, row_without_run
from vllm_repro.report.versions import markdown, terminal
from vllm_repro.running.resume_map import KeptMap, read_kept
from vllm_repro.running.run import private_folders, private_hosts, stamped_folder
from vllm_repro.running.terminal import Progress
from vllm_repro.scenario.catalogue import find, find_arms
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.servers.docker_engine import connect
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import Site
from vllm_repro.verdict.verdict import ReleaseResult, exit_status

__all__ = ["bounds", "releases"]

_HOLE = "{version}"
"""Known before any server is; that of the others is the first run's."""

_EPILOG = """

exit status:
  0  every release did what the scenario declares; one that the status does not mention may have the bug or not
  1  a surprise: a release that is declared bad lives, or one that is declared good dies
  2  undecided: a release that could not be tried, did not boot, or did not cross the boundary
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted

Each release is a run with a folder of its own. The map is rewritten after each in OUT/SCENARIO/versions/, as
versions.json and versions.md, so one that is cut keeps its rows. --resume goes on with it, in a folder of its own."""


def add(subparsers: Subparsers) -> None:
    parser = verb(
        subparsers,
        "versions",
        run,
        does="map a scenario over releases: which die, which live, which say nothing",
        example="vllm-repro versions tq-chunked-prefill --server rehearsal --versions 0.20.2,0.23.0,0.24.0,0.25.1",
        prints="what versions.json holds",
        more=_EPILOG,
    )
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="left out with --resume, if you like")
    parser.add_argument(
        "--versions",
        metavar="A,B,...",
        help="the releases, with commas between them (default: where the scenario's status changes)",
    )
    add_server_options(parser, which=("server", "model", "weights", "port"))
    parser.add_argument(
        "--image",
        metavar="I",
        help="the image to run, with {version} in place of the release (default: the official one)",
    )
    add_run_options(parser, arm="this arm in place of the first; may be given again")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="MAP",
        help="go on with the map in this folder: what ran to its end there is not run again, --versions adds to its releases, "
        "and all other options are that map's",
    )
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    kept = read_kept(arguments.resume) if arguments.resume else None
    if kept is not None:
        arguments = _as_begun(arguments, kept)
    if not arguments.scenario:
        raise UsageError("no SCENARIO is named", hint="vllm-repro list names them; vllm-repro versions --help")
    if arguments.server != "auto" and not ServerKind(arguments.server).facts.started:
        raise UsageError(
            "a running server is one release, so there is no map of it",
            hint="vllm-repro run SCENARIO --url U; or --server rehearsal, lab, process or docker",
        )
    scenario = find(arguments.scenario)
    names = arguments.arm or [arm.name for arm in scenario.leading]
    arms = find_arms(scenario, names)
    options = server_options(arguments)
    if arguments.versions is not None:
        versions = releases(arguments.versions)
    elif choice_of(scenario, options).kind.facts.in_lab and scenario.lab and scenario.lab.vllm:
        versions = (scenario.lab.vllm,)  # those of the status are in no cache and on no index
    else:
        versions = bounds(scenario)
    if options.image and _HOLE not in options.image:
        raise UsageError(
            f"every release would run {options.image}", hint=f"write {_HOLE} where its tag has the release"
        )
    # Once for all rows: a row of another kind of server would be no row of the same map.
    choice = choice_of(scenario, _for_release(options, versions[0]))
    if choice.kind.facts.container:
        connect().close()  # an engine that does not answer is no fault of any release
    options = replace(options, server=choice.kind.value)
    job = job_of(arguments, arguments.scenario, scenario, options, choice, arms)
    job = replace(job, named_arms=names)  # so that each run is repeated with these arms, and takes no other
    said = sys.stderr if arguments.json else sys.stdout
    if arguments.versions is None:
        text = f"No --versions: the releases where the status of {scenario.id} changes ({scenario.status}), and the one"
        print(f"{text} that it is tried with: {', '.join(versions)}.", file=said, flush=True)
    finished, folder = _Mapping(job, versions, said, kept).run()
    print("\n" + terminal(finished, str(folder / "versions.md")), file=said)
    if arguments.json:
        print_json(finished.as_json())
    return INTERRUPTED if finished.interrupted else exit_status(finished.expected)


def _as_begun(arguments: argparse.Namespace, kept: KeptMap) -> argparse.Namespace:
    """The arguments that the map was begun with, for its releases and those that this call adds."""
    begun = as_begun(
        arguments, [arguments.scenario] if arguments.scenario else [], kept.words[1:], beside=("versions",)
    )
    if arguments.scenario and find(arguments.scenario).id != find(begun.scenario).id:
        raise UsageError(
            f"the map in {kept.folder} is one of {begun.scenario}",
            hint=f"vllm-repro versions --resume {shlex.quote(str(arguments.resume))}",
        )
    begun.out = kept.out
    begun.versions = ",".join((*kept.versions, *(releases(arguments.versions) if arguments.versions else ())))
    return begun


def releases(text: str) -> tuple[str, ...]:
    """The releases that `0.23.0,v0.21,0.23.0` names: sorted, each once. Raises `UsageError`, also for a range: there is no list of
    all releases without a network, and one that is left out would look as if it had been tried."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise UsageError("--versions names no release", hint="--versions 0.23.0,0.24.0")
    for word in words:
        first, dash, last = word.partition("-")
        if dash and all(end.strip().removeprefix("v")[:1].isdigit() for end in (first, last)):
            raise UsageError(f"--versions takes no range such as {word}", hint="name each release: 0.23.0,0.24.0")
    return _ordered(map(release_version, words))


def bounds(scenario: Scenario) -> tuple[str, ...]:
    """The first release that is declared bad, the one that the scenario is tried with, and the first that is declared good."""
    status = scenario.status
    return _ordered(filter(None, (status.first_bad, scenario.try_with, status.first_good)))


def _ordered(versions: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(versions), key=Version))


def _for_release(options: ServerOptions, version: str) -> ServerOptions:
    image = options.image and options.image.replace(_HOLE, version)
    return replace(options, vllm=version, image=image)


class _Mapping:
    """One map in the making; what it holds is on the disk after each release."""

    def __init__(self, job: Job, versions: Sequence[str], said: TextIO, kept: KeptMap | None) -> None:
        self._job = job
        self._kept = kept
        self._said = said
        self._progress = Progress()
        self._redactor = Redactor(private_folders(), private_hosts(job.scenario), known_secrets(os.environ))
        self._started = time.time()
        self._folder: Path | None = None
        scenario, kind = job.scenario, job.choice.kind
        assert job.trials is not None, (
            "a row that stops early would be no row of the same map, so --trials takes a number here"
        )
        self._map = VersionMap(
            scenario.id,
            scenario.issue,
            scenario.title,
            scenario.status,
            kind.value,
            kind.facts.evidence,
            tuple(arm.name for arm in job.arms),
            job.trials,
            tuple(versions),
            (),
            __version__,
            time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started)),
            0.0,
            self._redactor.command(again("versions", job, kind, ("--versions", ",".join(versions)))),
        )
        self._announced = False
        if kept is not None:
            kept.refuse_other(self._map)
            self._started -= kept.head["duration_s"]
            self._map = replace(self._map, evidence=kept.head["evidence"], started_at=kept.head["started_at"])

    def run(self) -> tuple[VersionMap, Path]:
        """The map, finished or interrupted, and its folder."""
        versions = self._map.versions
        try:
            for number, version in enumerate(versions, 1):
                self._progress.line(f"{version} ({number} of {len(versions)})")
                row, interrupted = self._row(version)
                self._keep(self._map.with_row(row), interrupted)
                if interrupted:
                    break
        except KeyboardInterrupt as signal:
            # Between two runs, or in an install: a run takes the signals itself, and reports what it saw.
            self._keep(self._map, f"{signal}" or "SIGINT")
        assert self._folder is not None, "there is at least one release, and each is kept"
        return self._map, self._folder

    def _row(self, version: str) -> tuple[Row, str | None]:
        """The row of one release, and the signal that ended its run."""
        scenario = self._job.scenario
        report = self._kept.report(version) if self._kept else None
        if report is not None:
            self._progress.line(f"  as in {report.folder.name}")
            return self._row_of(report, version), None
        try:
            report = run_one(
                replace(self._job, options=_for_release(self._job.options, version)), self._progress, self._chosen
            )
        except (InfraError, Unsupported) as error:
            self._progress.line(f"  {error}" + (f"\n  next: {error.hint}" if error.hint else ""))
            outcome = ReleaseResult.INFRA if isinstance(error, InfraError) else ReleaseResult.UNSUPPORTED
            why = self._redactor.text(str(error))
            return row_without_run(version, scenario, self._job.arms, outcome, why), None
        return self._row_of(report, version), report.interrupted

    def _row_of(self, report: RunReport, version: str) -> Row:
        assert self._map.evidence is not None, "a run has a site, and `_chosen` was told of it"
        return row_of(report, version, self._job.scenario.status.standing(version), self._map.evidence)

    def _chosen(self, site: Site, why: str) -> None:
        if not self._announced:
            self._announced = True
            self._map = replace(self._map, evidence=site.evidence.value)
            print(first_line(site, why, None), file=self._said, flush=True)

    def _keep(self, version_map: VersionMap, interrupted: str | None) -> None:
        duration = round(time.time() - self._started, 3)
        self._map = replace(version_map, interrupted=interrupted, duration_s=duration)
        if self._folder is None:  # not before: a command that cannot be is to leave nothing
            self._folder = stamped_folder(self._job.out, Path(self._map.scenario) / "versions")
        hint = "free some space, or name another --out"
        text = json.dumps(self._map.as_json(), indent=2, ensure_ascii=False) + "\n"
        write_whole(self._folder / "versions.json", text, hint=hint)
        write_whole(self._folder / "versions.md", markdown(self._map), hint=hint)
