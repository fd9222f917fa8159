"""One night: a run of every scenario that this machine can run, at one release, and one result."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vllm_repro.errors import InfraError, ReproError, Unsupported
from vllm_repro.host.gpu_lease import busy_gpus
from vllm_repro.host.machine import gpus
from vllm_repro.journal.redact import Redactor
from vllm_repro.releases.sources import Source
from vllm_repro.report.files import FORMATS, write_file
from vllm_repro.report.model import RunReport
from vllm_repro.report.runs import Run, run_id
from vllm_repro.running.elsewhere import results
from vllm_repro.running.folders import link_to, private_folders, private_sources, stamped_folder
from vllm_repro.running.job import Job
from vllm_repro.running.run import run_one, signals_later
from vllm_repro.running.terminal import Progress
from vllm_repro.servers.docker_engine import Engine, connect, engine_errors, explain, gpu_prefix
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions, lacking, needs_of
from vllm_repro_nights.history import history
from vllm_repro_nights.history_formats import change_lines, html_page
from vllm_repro_nights.night_result import Light, Night, ScenarioNight, judged, markdown, suites
from vllm_repro_nights.runs import read_runs

_GB = 10**9
_FREE_SPACE = "free some space"


def run_night(
    jobs: Sequence[Job],
    options: ServerOptions,
    out: Path,
    least_disk_gb: float,
    show: Callable[[str], None],
    most_seconds: float = math.inf,
    vllms: Sequence[Source] = (),
) -> tuple[Night, Path]:
    """Run the jobs that fit this machine, write the night's files, return the night and its folder.

    With trouble of the host, run no job. An interrupt ends the night early; its files are written.

    options: what all jobs have in common, with `auto` resolved. least_disk_gb: space that must be
    free, in GB of 10**9 bytes. show: called with one line per scenario. most_seconds: start no run
    that would end later, by the time that it took before. vllms: those to compare.
    """
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    folder = stamped_folder(out, Path("nightly"))
    here = not any(job.elsewhere for job in jobs)
    public = Redactor([*private_folders(), *private_sources(job.options.vllm for job in jobs)]).text
    names = _names([*vllms, *(job.options.vllm for job in jobs)], public) if vllms[1:] else {}
    trouble: list[str] = []
    done: dict[int, ScenarioNight] = {}
    near: dict[str, str] = {}
    interrupted = None
    try:
        trouble += host_problems(ServerKind(options.server), out, least_disk_gb, runs_here=here)
        if here and not trouble:
            trouble += filter(None, [_pull_moving_tag(options)])
        for job, result in _run_jobs(jobs, out, most_seconds) if not trouble else ():
            done[id(job)] = result = replace(result, vllm=names.get(job.options.vllm, ""))
            show(f"{result.light}: {result.name}: {result.why}")
            if result.report is not None:
                interrupted = interrupted or result.report.interrupted
                copy = folder / result.scenario
                if copy.exists():
                    copy = folder / f"{copy.name}-{result.report.folder.name}"
                near[run_id(result.report)] = f"{copy.name}/report.html"
                trouble += _copy_reports(result.report, copy)
    except KeyboardInterrupt as signal:
        interrupted = f"{signal}" or "SIGINT"  # a run takes the signals itself
    with signals_later():  # a second Ctrl-C must not cost the summary
        why = "not run: the night was interrupted before"
        scenarios = [*done.values()] + [
            ScenarioNight(
                scenario=job.scenario.id,
                light=Light.CUT,
                why=why,
                vllm=names.get(job.options.vllm, ""),
            )
            for job in jobs
            if interrupted and id(job) not in done
        ]
        runs, _ = read_runs(out)
        past = history(runs, None)
        night = Night(
            asked=public(_asked_for(jobs, options)),
            started_at=started,
            scenarios=tuple(replace(result, why=public(result.why)) for result in scenarios),
            vllms=tuple(names.values()),
            trouble=tuple(map(public, trouble)),
            interrupted=interrupted,
            changes=None if past.since is None else tuple(change_lines(past)),
        )
        write_file(folder / "summary.md", markdown(night), hint=_FREE_SPACE)
        write_file(folder / "junit.xml", suites(night), hint=_FREE_SPACE)
        if runs:  # none if nothing ever ran
            page = folder / "nights.html"
            write_file(page, html_page(past, link_to(out, page), near), hint=_FREE_SPACE)
    return night, folder


def host_problems(
    kind: ServerKind, out: Path, least_disk_gb: float, *, runs_here: bool = True
) -> Iterator[str]:
    """Yield why this machine cannot run a night, or keep its reports if other machines run it."""
    folder = next(path for path in (out.resolve(), *out.resolve().parents) if path.exists())
    free = shutil.disk_usage(folder).free / _GB
    if free < least_disk_gb:
        yield (
            f"{free:.1f} GB are free where runs are written, and a night needs {least_disk_gb:g}"
            " (--least-disk)"
        )
    if not kind.facts.on_gpus or not runs_here:
        return
    try:
        here, busy = gpus(), busy_gpus()
    except InfraError as error:
        yield str(error)
        return
    if not here:
        yield "no NVIDIA GPU: nvidia-smi is absent, or lists none"
    elif len(busy) == len(here):  # else the runs lease the others
        yield from busy.values()
    if kind.facts.container and (missing := no_gpus_in_containers()):
        yield missing


def no_gpus_in_containers() -> str:
    """Return why no container can use a GPU; empty if one can, or if no image is here.

    Starts a container for a moment.
    """
    return _engine_problem(lambda engine: engine.client.images.list() and gpu_prefix(engine))


def _pull_moving_tag(options: ServerOptions) -> str:
    """Pull the night's image if its tag is `nightly` or `latest`, which move to new builds.

    Return why it could not be pulled; empty if it was, or for other images.
    """
    image = options.image or ""
    if not ServerKind(options.server).facts.container or not image.endswith(
        (":nightly", ":latest")
    ):
        return ""
    return _engine_problem(lambda engine: engine.client.images.pull(*image.rpartition(":")[::2]))


def _engine_problem(use: Callable[[Engine], object]) -> str:
    """Call `use` with the container engine; return why that failed, empty if it did not."""
    try:
        with contextlib.closing(connect()) as engine:
            use(engine)
    except (InfraError, Unsupported) as error:
        return error.with_hint
    except engine_errors() as error:
        return explain(error).with_hint
    return ""


def _names(
    vllms: Sequence[Source | None], public: Callable[[str], str]
) -> dict[Source | None, str]:
    """Return a name for each vLLM: without packages that all have, redacted, and no name twice."""
    known = [vllm for vllm in dict.fromkeys(vllms) if vllm]
    alike = len({vllm.packages for vllm in known}) == 1
    names: dict[Source | None, str] = {}
    for vllm in known:
        name = public(f"{vllm.base or vllm}" if alike else f"{vllm}")
        names[vllm] = f"{name} ({len(names) + 1})" if name in names.values() else name
    return names


def _asked_for(jobs: Sequence[Job], options: ServerOptions) -> str:
    """Return the vLLM and the servers that the night was asked for, as a phrase."""
    sources = dict.fromkeys(
        source for source in (options.vllm, *(job.options.vllm for job in jobs)) if source
    )
    servers = dict.fromkeys(job.options.server for job in jobs) or {options.server: None}
    on_gpus = ServerKind(options.server).facts.on_gpus
    usual = "the installed vllm" if on_gpus else "the release that each scenario is tried with"
    release = options.image or " and ".join(f"vLLM {source}" for source in sources) or usual
    return f"{release}, server {' or '.join(servers)}"


def _run_jobs(
    jobs: Sequence[Job], out: Path, most_seconds: float
) -> Iterator[tuple[Job, ScenarioNight]]:
    """Run the jobs, here one after the other until one is interrupted, elsewhere all at once.

    Yield each with its result. With a limit of time those that ran longest ago come first, and one
    that took longer before than the time left is not run.
    """
    began = time.monotonic()
    runs = read_runs(out)[0] if most_seconds < math.inf else []
    # The last run of each scenario in each release, and under None in any release.
    last = {(run.scenario, release): run for run in runs for release in (run.vllm_version, None)}

    def last_run(job: Job) -> Run | None:
        return last.get((job.scenario.id, f"{job.options.vllm}"), last.get((job.scenario.id, None)))

    def work(job: Job) -> ScenarioNight:
        took = run.duration_s if (run := last_run(job)) is not None else 0.0
        left = most_seconds - (time.monotonic() - began)
        if left <= took and not _unfit(job):
            why = (
                f"{max(0.0, left):.0f} s of {most_seconds:.0f} s were left, and it took {took:.0f}"
                " s before"
            )
            return ScenarioNight(scenario=job.scenario.id, light=Light.LATE, why=why)
        return _run_job(job)

    ordered = sorted(jobs, key=lambda job: run.started_at if (run := last_run(job)) else "")
    elsewhere = next((job.elsewhere for job in jobs), None)
    for job, result in results(work, ordered, elsewhere):
        yield job, result
        if elsewhere is None and result.report is not None and result.report.interrupted:
            return


def _run_job(job: Job) -> ScenarioNight:
    """Run one scenario and return its result; a `ReproError` of its run is a result, too.

    Do not run it if this machine cannot.
    """
    if unfit := _unfit(job):
        return ScenarioNight(scenario=job.scenario.id, light=Light.NONE, why=unfit)
    try:
        return judged(run_one(job, Progress()))
    except ReproError as error:  # also a fault of our own: the other scenarios can still run
        light = Light.NONE if isinstance(error, Unsupported) else Light.AMBER
        return ScenarioNight(scenario=job.scenario.id, light=light, why=error.with_hint)


def _unfit(job: Job) -> str:
    """Return why this machine or this kind of server cannot run the scenario; empty if it can."""
    scenario, options = job.scenario, job.options
    facts = ServerKind(options.server).facts
    if facts.in_lab and scenario.lab is None:
        return "it has no lab"
    if not facts.on_gpus:
        return ""
    if facts.container and not scenario.needs.gpus:
        return f"it needs {scenario.needs}, and a night in containers is of the image for GPUs"
    return "" if job.elsewhere else lacking(needs_of(scenario, options), gpus())


def _copy_reports(report: RunReport, folder: Path) -> Iterator[str]:
    """Copy a run's redacted reports into the new `folder`, without journal and logs.

    Yield why that failed. Nothing is copied before the iteration.
    """
    try:
        folder.mkdir()
        for name in FORMATS.values():
            if (report.folder / name).exists():  # a scenario without a script has no repro.py
                shutil.copyfile(report.folder / name, folder / name)
    except OSError as error:  # the run is complete in its own folder
        yield (
            f"the reports of {report.scenario} could not be copied beside the night:"
            f" {error.strerror}"
        )
