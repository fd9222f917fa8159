"""One night: a run of every scenario that this machine can run, at one release, and one result: green, red or amber."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from vllm_repro.errors import InfraError, ReproError, Unsupported
from vllm_repro.host.gpu_lease import busy_gpus
from vllm_repro.host.machine import gpus
from vllm_repro.journal.redact import Redactor
from vllm_repro.report.files import FORMATS, write_file
from vllm_repro.report.model import RunReport
from vllm_repro.report.runs import Run, read_runs, run_id
from vllm_repro.running.elsewhere import results
from vllm_repro.running.folders import link_to, private_folders, private_sources, stamped_folder
from vllm_repro.running.job import Job
from vllm_repro.running.run import run_one, signals_later
from vllm_repro.running.terminal import Progress
from vllm_repro.servers.docker_engine import connect, engine_errors, explain, gpu_prefix
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions, lacking, needs_of
from vllm_repro_nights.night import Light, Night, Slot, light_of, markdown, suites
from vllm_repro_nights.page import page
from vllm_repro_nights.summary import summarize
from vllm_repro_nights.text import news_lines

__all__ = ["host_problems", "no_gpus_in_containers", "run_night"]

_GB = 10**9


def run_night(
    jobs: Sequence[Job],
    options: ServerOptions,
    out: Path,
    least_disk_gb: float,
    show: Callable[[str], None],
    most_seconds: float | None = None,
) -> tuple[Night, Path]:
    """Run the jobs that fit this machine, write the night's files, and return the night and its folder.

    options: what all jobs have in common, with `auto` resolved. show: called with one line per scenario. most_seconds: start no run that
    would end later, by the time that it took before; those that ran longest ago come first.
    """
    kind = ServerKind(options.server)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    folder = stamped_folder(out, Path("nightly"))
    here = not any(job.elsewhere for job in jobs)
    wrong = list(host_problems(kind, out, least_disk_gb, runs_here=here))
    slots: list[Slot] = []
    near: dict[str, str] = {}
    interrupted = None
    try:
        if not wrong and here:
            wrong += _pull_moving_tag(options)
        for slot in _slots(jobs, out, most_seconds) if not wrong else ():
            slots.append(slot)
            show(f"{slot.light}: {slot.scenario}: {slot.why}")
            if slot.report is not None:
                interrupted = interrupted or slot.report.interrupted
                copy = folder / slot.scenario
                copy = folder / f"{slot.scenario}-{slot.report.folder.name}" if copy.exists() else copy
                near[run_id(slot.report)] = f"{copy.name}/report.html"
                wrong += _copy_reports(slot.report, copy)
    except KeyboardInterrupt as signal:
        interrupted = f"{signal}" or "SIGINT"  # between two runs, or in an install; a run takes the signals itself
    with signals_later():  # a second Ctrl-C must not cost the summary
        rows, _ = read_runs(out)
        summary = summarize(rows, None)
        public = Redactor([*private_folders(), *private_sources(job.options.vllm for job in jobs)]).text
        night = Night(
            asked=public(_request(jobs, options)),
            started_at=started,
            slots=tuple(replace(slot, why=public(slot.why)) for slot in slots),
            trouble=tuple(map(public, wrong)),
            interrupted=interrupted,
            changes=None if summary.since is None else tuple(news_lines(summary)),
        )
        write_file(folder / "summary.md", markdown(night), hint="free some space")
        write_file(folder / "junit.xml", suites(night), hint="free some space")
        if rows:  # none if nothing ever ran
            file = folder / "nights.html"
            write_file(file, page(summary, link_to(out, file), near=near), hint="free some space")
    return night, folder


def host_problems(kind: ServerKind, out: Path, least_disk_gb: float, *, runs_here: bool = True) -> Iterator[str]:
    """Yield a sentence for each reason why this machine cannot run a night, or if other machines run it, keep its reports."""
    folder = next(path for path in (out.resolve(), *out.resolve().parents) if path.exists())
    free = shutil.disk_usage(folder).free / _GB
    if free < least_disk_gb:
        yield f"{free:.1f} GB are free where runs are written, and a night needs {least_disk_gb:g} (--least-disk)"
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
    """Return why no container can use a GPU; empty if one can, or if there is no image to try it with."""
    try:
        with contextlib.closing(connect()) as engine:
            if engine.client.images.list():
                gpu_prefix(engine)
    except (InfraError, Unsupported) as error:
        return error.with_hint
    except engine_errors() as error:
        return explain(error).with_hint
    return ""


def _pull_moving_tag(options: ServerOptions) -> Iterator[str]:
    """Pull an image whose tag is another build every night. Yield why it could not be pulled."""
    image = options.image or ""
    if not ServerKind(options.server).facts.container or not image.endswith((":nightly", ":latest")):
        return
    try:
        with contextlib.closing(connect()) as engine:
            engine.client.images.pull(*image.rpartition(":")[::2])
    except InfraError as error:
        yield error.with_hint
    except engine_errors() as error:
        yield explain(error).with_hint


def _request(jobs: Sequence[Job], options: ServerOptions) -> str:
    """Return what was asked for, as a phrase."""
    sources = dict.fromkeys(source for source in (options.vllm, *(job.options.vllm for job in jobs)) if source)
    release = options.image or " and ".join(f"vLLM {source}" for source in sources) or "the installed vllm"
    if not ServerKind(options.server).facts.on_gpus and not sources:
        release = "the release that each scenario is tried with"
    servers = dict.fromkeys(job.options.server for job in jobs) or {options.server: None}
    return f"{release}, server {' or '.join(servers)}"


def _unfit(job: Job) -> str:
    """Return why this machine, or this kind of server, cannot run the scenario; empty if it can."""
    scenario, options = job.scenario, job.options
    facts = ServerKind(options.server).facts
    if facts.in_lab and scenario.lab is None:
        return "it has no lab"
    if not facts.on_gpus:
        return ""
    if facts.container and not scenario.needs.gpus:
        return f"it needs {scenario.needs}, and a night in containers is of the image for GPUs"
    return "" if job.elsewhere else lacking(needs_of(scenario, options), gpus())


def _slots(jobs: Sequence[Job], out: Path, most_seconds: float | None) -> Iterator[Slot]:
    """Run the jobs, here one after the other until one is interrupted, elsewhere all at once."""
    began = time.monotonic()
    runs = read_runs(out)[0] if most_seconds is not None else ()
    last = {(run.scenario, which): run for run in runs for which in (run.vllm_version, None)}

    def before(job: Job) -> Run | None:
        """Return the last run of the scenario in this release, else in any."""
        return last.get((job.scenario.id, f"{job.options.vllm}"), last.get((job.scenario.id, None)))

    def slot(job: Job) -> Slot:
        name = job.scenario.id
        if unfit := _unfit(job):
            return Slot(scenario=name, light=Light.NONE, why=unfit)
        took = run.duration_s if (run := before(job)) else 0.0
        if most_seconds is not None and (left := most_seconds - (time.monotonic() - began)) <= took:
            why = f"{max(0.0, left):.0f} s of {most_seconds:.0f} were left" + (
                f"; it took {took:.0f} s" if took else ""
            )
            return Slot(scenario=name, light=Light.LATE, why=why)
        try:
            return _slot(run_one(job, Progress()))
        except Unsupported as error:
            return Slot(scenario=name, light=Light.NONE, why=error.with_hint)
        except ReproError as error:  # also a fault of our own: the other scenarios can still run
            return Slot(scenario=name, light=Light.AMBER, why=error.with_hint)

    ordered = sorted(jobs, key=lambda job: run.started_at if (run := before(job)) else "")
    elsewhere = next((job.elsewhere for job in jobs), None)
    for _, found in results(slot, ordered, elsewhere):
        yield found
        if elsewhere is None and found.report is not None and found.report.interrupted:
            return


def _slot(report: RunReport) -> Slot:
    light = light_of(report)
    why = report.verdict.because
    if light is Light.NONE and report.imitated:
        why = next(trial.why for arm in report.arms for trial in arm.trials)
    return Slot(scenario=report.scenario, light=light, why=why, report=report)


def _copy_reports(report: RunReport, folder: Path) -> Iterator[str]:
    """Copy the redacted reports beside the night; journal and logs stay in the run's folder. Yield why it failed."""
    try:
        folder.mkdir()
        for name in FORMATS.values():
            if (report.folder / name).exists():  # a scenario without a script has no repro.py
                shutil.copyfile(report.folder / name, folder / name)
    except OSError as error:  # the run is complete in its own folder
        yield f"the reports of {report.scenario} could not be copied beside the night: {error.strerror}"
