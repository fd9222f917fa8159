"""`vllm-repro nightly`: every scenario that this machine can run, at one release, and one answer: green, red or amber."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vllm_repro.cli.common import Subparsers, verb
from vllm_repro.cli.history import way
from vllm_repro.cli.options import add_server_options, server_options
from vllm_repro.cli.running import add_run_options, job_of, run_one
from vllm_repro.errors import INTERRUPTED, InfraError, ReproError, Unsupported, UsageError
from vllm_repro.history.account import account
from vllm_repro.history.night import Light, Night, Slot, annotation, light_of, markdown, suites
from vllm_repro.history.page import page
from vllm_repro.history.rows import row_id
from vllm_repro.history.store import Store
from vllm_repro.host.machine import gpu_lock, gpus
from vllm_repro.releases.localvllm import local_vllm
from vllm_repro.report.files import FORMATS, write_whole
from vllm_repro.report.junit import junit
from vllm_repro.report.model import RunReport
from vllm_repro.running.preflight import pull, trouble
from vllm_repro.running.run import default_out, stamped_folder
from vllm_repro.running.terminal import Progress
from vllm_repro.scenario.catalogue import all_scenarios, find, find_arms, to_stderr
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.docker_engine import connect
from vllm_repro.servers.kinds import ServerKind, kinds
from vllm_repro.servers.options import ServerOptions, lacking, needs_of
from vllm_repro.servers.site import ServerChoice

NIGHTLY_IMAGE = "vllm/vllm-openai:nightly"

_SERVER, _IMAGE, _VLLM, _SCENARIOS = (f"VLLM_REPRO_NIGHTLY_{name}" for name in ("SERVER", "IMAGE", "VLLM", "SCENARIOS"))
_EPILOG = f"""

Exit status: 0 green, every arm did what is declared for that release; 1 red, a surprise; 2 amber, undecided or trouble of the host.
A CI file may set {_SERVER}, {_IMAGE}, {_VLLM} and {_SCENARIOS} in place of the options; docs/nightly.md."""

_Part = tuple[str, Scenario, list[Arm]]
"""What a scenario was named as, and which of its arms are asked for."""


def add(subparsers: Subparsers) -> None:
    parser = verb(
        subparsers,
        "nightly",
        run,
        does="run every scenario that this machine can, at one release, and say green, red or amber",
        example="vllm-repro nightly --server docker --image vllm/vllm-openai:nightly",
        more=_EPILOG,
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="only these (default: all of the package)")
    parser.add_argument(
        "--server",
        choices=("auto", *kinds(lambda facts: facts.started)),
        default=os.environ.get(_SERVER) or "auto",
        help="where the vLLM comes from (default: auto: docker where an engine has GPUs, else the vllm on PATH; never a rehearsal)",
    )
    add_server_options(parser, which=("image", "vllm", "weights"))
    add_run_options(parser, arm="only this arm; may be given again", auto=True)
    parser.add_argument(
        "--least-disk", type=float, default=20.0, metavar="GB", help="room that must be free for the runs (default: 20)"
    )


def run(arguments: argparse.Namespace) -> int:
    options = _options(arguments)
    kind = ServerKind(options.server)
    out = arguments.out or default_out()
    asked = _asked_for(arguments)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    folder = stamped_folder(out, Path("nightly"))
    wrong = list(trouble(kind, out, arguments.least_disk))
    slots: list[Slot] = []
    reports: list[RunReport] = []
    interrupted = None
    try:
        with gpu_lock(needed=not wrong and kind.facts.on_gpus):
            if not wrong:
                wrong += _pulled(options)
            for slot, report in _slots(asked, arguments, options) if not wrong else ():
                slots.append(slot)
                print(f"{slot.light}: {slot.scenario}: {slot.why}", flush=True)
                if report is not None:
                    reports.append(report)
                    interrupted = report.interrupted
                    wrong += _kept(report, folder / slot.scenario)
    except KeyboardInterrupt as signal:
        interrupted = f"{signal}" or "SIGINT"  # between two runs, or in an install: a run takes the signals itself
    night = Night(_request(options), started, tuple(slots), tuple(wrong), interrupted)
    _publish(night, reports, folder, out)
    return INTERRUPTED if interrupted else night.light.status


def _asked_for(arguments: argparse.Namespace) -> list[_Part]:
    """Each scenario once, by the name that it was asked for by first. Raises `UsageError`, before anything runs."""
    named = arguments.scenarios or os.environ.get(_SCENARIOS, "").split()
    scenarios = [(name, find(name)) for name in named] or [(one.id, one) for one in all_scenarios(warn=to_stderr)]
    asked: dict[str, _Part] = {}
    for name, scenario in scenarios:
        asked.setdefault(scenario.id, (name, scenario, find_arms(scenario, arguments.arm)))
    return list(asked.values())


def _pulled(options: ServerOptions) -> Iterator[str]:
    """Fetches an image whose tag is of another build every night; why it could not."""
    try:
        if ServerKind(options.server).facts.container and (options.image or "").endswith((":nightly", ":latest")):
            pull(str(options.image))
    except InfraError as error:
        yield error.told


def _options(arguments: argparse.Namespace) -> ServerOptions:
    """With the environment's in place of what was not given, and `auto` resolved. Raises `UsageError`."""
    options = server_options(arguments)
    options = replace(
        options,
        image=options.image or os.environ.get(_IMAGE) or None,
        vllm=options.vllm or os.environ.get(_VLLM) or None,
    )
    known = ("auto", *kinds(lambda facts: facts.started))
    if options.server not in known:
        raise UsageError(f"{_SERVER} is {options.server!r}", hint=f"{', '.join(known[:-1])} or {known[-1]}")
    if options.server == "auto":
        local = not options.image and (options.vllm or local_vllm())
        options = replace(options, server=ServerKind.PROCESS if local and not _docker_has_gpus() else ServerKind.DOCKER)
    if ServerKind(options.server).facts.container and not options.vllm:
        options = replace(options, image=options.image or NIGHTLY_IMAGE)
    return options


def _docker_has_gpus() -> bool:
    with contextlib.suppress(InfraError), contextlib.closing(connect()) as engine:  # no engine has none
        return "nvidia" in engine.runtimes
    return False


def _request(options: ServerOptions) -> str:
    release = options.image or (f"vLLM {options.vllm}" if options.vllm else "the installed vllm")
    if not ServerKind(options.server).facts.on_gpus and not options.vllm:
        release = "the release that each scenario is tried with"
    return f"{release}, server {options.server}"


def _unfit(scenario: Scenario, options: ServerOptions) -> str:
    """Why this machine, or this kind of server, cannot run it; empty where it can."""
    facts = ServerKind(options.server).facts
    if facts.in_lab and scenario.lab is None:
        return "it has no lab"
    if not facts.on_gpus:
        return ""
    if facts.container and not scenario.needs.gpus:
        return f"it needs {scenario.needs}, and a night in containers is of the image for GPUs"
    return lacking(needs_of(scenario, options), gpus())


def _slots(
    asked: Sequence[_Part], arguments: argparse.Namespace, options: ServerOptions
) -> Iterator[tuple[Slot, RunReport | None]]:
    for name, scenario, arms in asked:
        needs = str(scenario.needs)
        if unfit := _unfit(scenario, options):
            yield Slot(scenario.id, Light.NONE, unfit, needs), None
            continue
        job = job_of(arguments, name, scenario, options, ServerChoice(ServerKind(options.server), ""), arms)
        try:
            report = run_one(job, Progress(), _unsaid)
        except Unsupported as error:
            yield Slot(scenario.id, Light.NONE, error.told, needs), None
        except ReproError as error:  # also one of our own: it takes nothing from what the others showed
            yield Slot(scenario.id, Light.AMBER, error.told, needs), None
        else:
            yield _slot(report, needs), report
            if report.interrupted:
                return


def _unsaid(*_: object) -> None:
    """The first line of a run: a night says what it asked for once."""


def _slot(report: RunReport, needs: str) -> Slot:
    light = light_of(report)
    why = report.verdict.because
    if light is Light.NONE and report.imitated:
        why = next(trial.why for arm in report.arms for trial in arm.trials)
    return Slot(
        report.scenario,
        light,
        why,
        needs,
        report.verdict.verdict,
        report.version,
        report.evidence,
        report.duration_s,
        report.folder.name,
    )


def _kept(report: RunReport, folder: Path) -> Iterator[str]:
    """Puts beside the night what others may read, the redacted reports; why it could not. Journal and logs stay where the run is."""
    try:
        folder.mkdir()
        for name in FORMATS.values():
            shutil.copyfile(report.folder / name, folder / name)
    except OSError as error:  # the run is whole in its own folder, and the others may go on
        yield f"the reports of {report.scenario} could not be copied beside the night: {error.strerror}"


def _publish(night: Night, reports: Sequence[RunReport], folder: Path, out: Path) -> None:
    """The night's files, the summary of a GitHub job, its mark, and the end of the terminal. out: of all runs."""
    text = markdown(night)
    write_whole(folder / "summary.md", text, hint="free some space")
    write_whole(folder / "junit.xml", suites(night, map(junit, reports)), hint="free some space")
    _write_page(folder / "nights.html", out, {row_id(report): f"{report.scenario}/report.html" for report in reports})
    for name, added in (("GITHUB_STEP_SUMMARY", text), ("GITHUB_OUTPUT", f"light={night.light}\nfolder={folder}\n")):
        if os.environ.get(name):
            with Path(os.environ[name]).open("a", encoding="utf-8") as file:
                file.write(added)
    if os.environ.get("GITHUB_ACTIONS") and (mark := annotation(night)):
        print(mark)
    print(f"\nnight:   {night.headline}\nsummary: {folder / 'summary.md'}", file=sys.stdout, flush=True)


def _write_page(file: Path, out: Path, near: Mapping[str, str]) -> None:
    """This night beside the ones before it; its own reports are linked as they lie beside the page (`near`). The history is an extra: a
    night does not fail of it."""
    store = Store(out)
    try:
        store.catch_up()
        rows = store.rows()
    except InfraError as error:
        print(f"no page: {error.told}", file=sys.stderr)
        return
    if rows:  # none where nothing could be run, and nothing ever was
        write_whole(file, page(account(rows, None), way(out, file), near=near), hint="free some space")
