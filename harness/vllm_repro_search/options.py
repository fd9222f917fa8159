"""Shared part of the verbs that search: limits, resume, the job of one arm, the text to paste."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vllm_repro import __version__
from vllm_repro.cli.common import add_common, duration, number, print_json
from vllm_repro.cli.options import add_run_options, job_from, resumed
from vllm_repro.cli.server_options import add_server_options, server_options
from vllm_repro.errors import INTERRUPTED, UsageError
from vllm_repro.running.folders import with_out
from vllm_repro.running.job import Job, choice_of, repeat_command
from vllm_repro.scenario.catalogue import find, find_arms
from vllm_repro.scenario.scenario import Arm
from vllm_repro_search.boot_search import BootSearch
from vllm_repro_search.record import SearchRecord
from vllm_repro_search.resume import UnfinishedSearch, read_search

__all__ = [
    "add_limits",
    "add_search",
    "begun",
    "common_fields",
    "job_of_one_arm",
    "run_of_arm",
    "run_search",
]


def add_search(parser: argparse.ArgumentParser, *, example: str, prints: str, more: str) -> None:
    """Add the options of a search that boots one arm of a scenario. For the texts see `add_common`."""
    add_common(parser, example=example, prints=prints, more=more)
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="may be left out with --resume")
    add_limits(parser)
    add_server_options(parser, which=("server", "image", "vllm", "model", "weights"))
    add_run_options(parser, arm="this arm instead of the first", trials=False)


def job_of_one_arm(arguments: argparse.Namespace, verb: str) -> Job:
    """Return the job of a command line with `add_search`. Raises `UsageError`."""
    if not arguments.scenario:
        raise UsageError("no SCENARIO is named", hint=f"vllm-repro list names them; vllm-repro {verb} --help")
    scenario = find(arguments.scenario)
    arms = find_arms(scenario, arguments.arm or [scenario.arms[0].name])
    if len(arms) != 1:
        raise UsageError(f"{len(arms)} arms are named, and this follows one", hint="give --arm once")
    options = server_options(arguments)
    choice = choice_of(scenario, options)
    if not choice.kind.facts.started:
        raise UsageError(
            "a running server is not booted again after a crash", hint="--server process, docker or lab starts its own"
        )
    options = replace(options, server=choice.kind.value)  # boots of different kinds of server are not comparable
    job = job_from(arguments, name=arguments.scenario, scenario=scenario, options=options, choice=choice, arms=arms)
    job = replace(job, named_arms=[arms[0].name])
    release = ("--vllm", options.vllm or job.version(choice.kind))
    return replace(job, reproduce=repeat_command(verb, job, choice.kind, release))


def run_of_arm(job: Job) -> str:
    """Return the command that runs the arm's own workload."""
    return with_out(repeat_command("run", job, job.choice.kind, ("--vllm", job.options.vllm)), job.out)


def common_fields(job: Job, arm: Arm, reproduce: str) -> dict[str, Any]:
    """Return the fields of a `SearchRecord` for a search that has not begun."""
    scenario, kind = job.scenario, job.choice.kind
    return {
        "scenario": scenario.id,
        "issue": scenario.issue,
        "title": scenario.title,
        "status": asdict(scenario.status),
        "arm": arm.name,
        "server": kind.value,
        "evidence": kind.facts.evidence,
        "harness_version": __version__,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "duration_s": 0.0,
        "reproduce": reproduce,
    }


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add `--max-boots`, `--max-time` and `--resume`."""
    parser.add_argument("--max-boots", type=_boots, metavar="N", help="stop after so many boots, with what is known")
    parser.add_argument(
        "--max-time", type=duration, metavar="TIME", help="start no boot after this time: 90s, 30m or 2h"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="continue the search in this folder with its options: --max-boots and --max-time may be given anew",
    )


def begun(arguments: argparse.Namespace, verb: str) -> tuple[argparse.Namespace, UnfinishedSearch | None]:
    """Return the arguments of the first call with the limits of this one, and what is resumed, if anything. Raises `UsageError`."""
    if not arguments.resume:
        return arguments, None
    unfinished = read_search(arguments.resume, verb)
    # A script is given anew: a record may come from somebody else.
    limits = {name: getattr(arguments, name) for name in ("max_boots", "max_time", "script") if name in arguments}
    arguments = resumed(arguments, unfinished, beside=limits)
    vars(arguments).update(limits)
    return arguments, unfinished


def run_search(arguments: argparse.Namespace, search: BootSearch[Any, Any], unfinished: UnfinishedSearch | None) -> int:
    """Run or resume a search, print the text to paste, where it is, and how to resume; return the exit status."""
    stream = sys.stderr if arguments.json else sys.stdout  # with `--json` the standard output holds JSON alone
    if unfinished is not None:
        search.resume(unfinished)
    folder = search.run(arguments.max_boots, arguments.max_time, lambda line: print(line, file=stream, flush=True))
    found: SearchRecord = search.found
    text = search.as_markdown(replace(found, reproduce=with_out(found.reproduce, search.job.out)))
    print(f"\n{text}", file=stream)
    print(f"this text: {folder / search.file}.md", file=stream)
    if found.stopped:
        script = ["--script", arguments.script] if getattr(arguments, "script", None) else []
        print(f"resume:    {shlex.join(['vllm-repro', search.verb, '--resume', str(folder), *script])}", file=stream)
    if arguments.json:
        print_json(search.as_dict(found))
    return INTERRUPTED if found.stopped and found.stopped.startswith("SIG") else found.exit_status


def _boots(text: str) -> int:
    return number(text, least=1, most=1_000, what="number of boots")
