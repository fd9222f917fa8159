"""`vllm-repro nightly`: every scenario that this machine can run, and one result."""

from __future__ import annotations

import argparse
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from vllm_repro.cli.common import add_common, duration, print_json
from vllm_repro.cli.options import add_run_options, job_from
from vllm_repro.cli.server_options import add_server_options, server_options
from vllm_repro.cli.source_option import source
from vllm_repro.errors import INTERRUPTED, UsageError
from vllm_repro.releases.known import NEWEST
from vllm_repro.releases.local_vllm import local_vllm
from vllm_repro.releases.sources import Source
from vllm_repro.report.format import columns, terminal_width
from vllm_repro.running.folders import default_out
from vllm_repro.running.job import Job
from vllm_repro.scenario.catalogue import all_scenarios, find, find_arms, to_stderr
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.servers.kinds import ServerKind, kinds
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import ServerChoice
from vllm_repro_nights.night_result import Light, Night, annotation, as_values, markdown
from vllm_repro_nights.run_night import no_gpus_in_containers, run_night

NIGHTLY_IMAGE = "vllm/vllm-openai:nightly"
# Value of `--server`: for each scenario the kind that runs it without a GPU.
CPU = "cpu"
_VARIABLE = "VLLM_REPRO_NIGHTLY_"
_EPILOG = f"""

--server cpu is for a machine without a GPU: the newest release, and SOURCE if --vllm names one,
each on a CPU as it is if the scenario needs no GPU, else in the lab. It runs only the arms that
show the bug.

Exit status: 0 green, every arm did what is declared for that release; 1 red, a surprise; 2 amber,
undecided or trouble of the host.

A CI file may set {_VARIABLE}SERVER, _IMAGE, _VLLM, _WEIGHTS, _SCENARIOS, _ARM, _TRIALS,
_MAX_TIME, _FAIL_ON and _THROUGHPUT (on or off) instead of the options. Details:
vllm_repro_nights/docs/nightly.md."""
# Options that a variable may set, without `--arm`, which is repeated, and those without a value.
_OPTIONS = ("server", "image", "vllm", "weights", "trials", "max-time", "fail-on")
# letters of a cell of the table by vLLM
_WIDEST = 40
# Values of `--fail-on`: the mildest result with which a night does not exit with 0.
FAIL_ON = ("red", "trouble", "amber")


def _variable(name: str) -> str:
    """Return the variable `VLLM_REPRO_NIGHTLY_` + name; empty if it is not set."""
    return os.environ.get(f"{_VARIABLE}{name}", "")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm-repro nightly`."""
    add_common(
        parser,
        example="vllm-repro nightly --server docker --image vllm/vllm-openai:nightly",
        prints="the light, each scenario's result and the reason",
        more=_EPILOG,
    )
    parser.add_argument(
        "scenarios", nargs="*", metavar="SCENARIO", help="only these (default: all of the package)"
    )
    parser.add_argument(
        "--server",
        choices=("auto", CPU, *kinds(lambda facts: facts.started)),
        default="auto",
        help=(
            "where the vLLM comes from (default: auto: docker if an engine has GPUs, else the vllm"
            " on PATH; never a rehearsal). cpu: a release on this CPU, in the lab if the scenario"
            " needs GPUs"
        ),
    )
    add_server_options(parser, names=("image", "with", "weights"))
    parser.add_argument(
        "--vllm",
        type=lambda text: [source(name.strip()) for name in text.split(",")],
        metavar="SOURCE,...",
        help=(
            "a release such as 0.23.0, a wheel file, a folder that holds vllm/, or a commit as in"
            " ~/vllm@abc123; several make a table of scenarios by vLLM, in this order"
        ),
    )
    add_run_options(
        parser,
        arm="only this arm; may be given again",
        auto=True,
        on="its scenarios side by side",
        throughput=True,
    )
    parser.add_argument(
        "--max-time",
        type=duration,
        metavar="TIME",
        default=math.inf,
        help=(
            "start no run that would end after this time, if it takes as long as the last run of"
            " its scenario: 90s, 30m or 2h; those that ran longest ago come first"
        ),
    )
    parser.add_argument(
        "--least-disk",
        type=float,
        default=20.0,
        metavar="GB",
        help="disk space that must be free for the runs (default: 20)",
    )
    parser.add_argument(
        "--fail-on",
        choices=FAIL_ON,
        default="amber",
        help=(
            "exit with 0 after a night that is better. trouble: an amber night exits with 2 only if"
            " the host had trouble or nothing ran, not if runs were undecided (default: amber)"
        ),
    )
    _read_variables(parser)


def _read_variables(parser: argparse.ArgumentParser) -> None:
    """Make the values of the variables the parser's defaults, checked like options.

    Exit with the parser's error for a wrong value.
    """
    words = [
        f"--{name}={value}"
        for name in _OPTIONS
        if (value := _variable(name.upper().replace("-", "_")))
    ]
    switches = {"": [], "on": ["--throughput"], "off": ["--no-throughput"]}
    if (switch := _variable("THROUGHPUT")) not in switches:
        parser.error(f"{_VARIABLE}THROUGHPUT is {switch!r}, neither on nor off")
    words = [*words, *switches[switch], "--", *_variable("SCENARIOS").split()]
    parser.set_defaults(**vars(parser.parse_args(words)))


def run(arguments: argparse.Namespace) -> int:
    """Run `vllm-repro nightly`: one night of all scenarios; return the exit status.

    It is 0 for an amber night that is better than `--fail-on`.
    """
    # no default of the parser: a repeated option adds to that
    arguments.arm = arguments.arm or _variable("ARM").split()
    each = [_options(arguments, vllm) for vllm in arguments.vllm or [None]]
    if arguments.on and arguments.max_time < math.inf:
        raise UsageError(
            "--max-time is for runs one after the other, and --on begins all at once",
            hint="leave one out",
        )
    if arguments.on not in (None, "local") and arguments.server == "auto":
        raise UsageError(
            "--server auto looks at this machine, and --on runs on others",
            hint=f"--server {CPU} or docker",
        )
    options = each[0]
    if options.image and len(each) > 1:
        raise UsageError("every vLLM would run the same image", hint="leave out --image")
    jobs = {
        (job.scenario.id, job.options.vllm): job
        for server in each
        for job in jobs_from(arguments, server)
    }
    if options.server == CPU:
        options = replace(options, server=ServerKind.LAB)
    stream = sys.stderr if arguments.json else sys.stdout
    night, folder = run_night(
        [*jobs.values()],
        options,
        arguments.out or default_out(),
        arguments.least_disk,
        lambda line: print(line, file=stream, flush=True),
        arguments.max_time,
        [server.vllm for server in each if server.vllm],
    )
    _publish(night, folder, stream)
    if arguments.json:
        print_json(as_values(night) | {"folder": str(folder)})
    if night.interrupted:
        return INTERRUPTED
    fails = {"red": False, "trouble": night.had_trouble, "amber": True}[arguments.fail_on]
    return 0 if night.light is Light.AMBER and not fails else night.light.status


def jobs_from(arguments: argparse.Namespace, options: ServerOptions) -> list[Job]:
    """Return a job for each scenario, once if it is named twice.

    Without names, for all known scenarios. With `--server cpu` a scenario may have two releases.
    Raises `UsageError`, before anything runs.
    """
    scenarios = [(name, find(name)) for name in arguments.scenarios] or [
        (scenario.id, scenario) for scenario in all_scenarios(warn=to_stderr)
    ]
    jobs: dict[tuple[str, Source | None], Job] = {}
    for name, scenario in scenarios:
        arms = find_arms(scenario, arguments.arm)
        for server in _on_cpu(scenario, options) if options.server == CPU else (options,):
            job = job_from(
                arguments,
                name=name,
                scenario=scenario,
                options=server,
                choice=ServerChoice(ServerKind(server.server), ""),
                arms=arms,
            )
            if options.server == CPU and not arguments.arm:
                job = replace(
                    job, arms=scenario.leading, named_arms=[arm.name for arm in scenario.leading]
                )
            jobs.setdefault((scenario.id, server.vllm), job)
    return list(jobs.values())


def _on_cpu(scenario: Scenario, options: ServerOptions) -> list[ServerOptions]:
    """Return the options of a scenario's runs without a GPU: the newest release, and `--vllm`.

    With `--with` only the latter. They use the lab if the scenario has one, else a process.
    """
    kind = ServerKind.LAB if scenario.lab else ServerKind.PROCESS
    exchanged = options.vllm and options.vllm.packages
    sources = dict.fromkeys((None if exchanged else Source(release=NEWEST), options.vllm))
    return [replace(options, server=kind, vllm=source) for source in sources if source]


def _options(arguments: argparse.Namespace, vllm: Source | None) -> ServerOptions:
    """Return the server options for one vLLM, with `auto` and the default image resolved.

    `--server cpu` stays. Raises `UsageError` for it with an image.
    """
    options = server_options(argparse.Namespace(**vars(arguments) | {"vllm": vllm}))
    if options.server == CPU and options.image:
        raise UsageError(
            f"--server {CPU} runs no image",
            hint=f"leave out --image, or the variable {_VARIABLE}IMAGE",
        )
    if options.server == "auto":
        local = (
            not options.image
            and bool(options.vllm or local_vllm())
            and bool(no_gpus_in_containers())
        )
        kind, *_ = kinds(lambda facts: facts.on_gpus and facts.container is not local)
        options = replace(options, server=kind)
    if options.server != CPU and ServerKind(options.server).facts.container and not options.vllm:
        options = replace(options, image=options.image or NIGHTLY_IMAGE)
    return options


def _publish(night: Night, folder: Path, stream: TextIO) -> None:
    """Print the night's result; in a GitHub job also add it to the summary and the outputs."""
    for name, added in (
        ("GITHUB_STEP_SUMMARY", markdown(night)),
        ("GITHUB_OUTPUT", f"light={night.light}\nfolder={folder}\n"),
    ):
        if os.environ.get(name):
            with Path(os.environ[name]).open("a", encoding="utf-8") as file:
                file.write(added)
    if os.environ.get("GITHUB_ACTIONS") and (mark := annotation(night)):
        print(mark, file=stream)
    if table := night.by_vllm:
        widths = [_WIDEST] * len(table[0])
        print("", *columns(table, widths, terminal_width()), sep="\n", file=stream)
    print(f"\nnight:   {night.headline}\nsummary: {folder / 'summary.md'}", file=stream, flush=True)
