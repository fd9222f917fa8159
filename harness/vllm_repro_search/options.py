"""Shared part of the verbs that search: limits, resume, the job of one arm, the text to paste."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from msgspec import structs

from vllm_repro import __version__
from vllm_repro.cli.common import add_common, duration, number, print_json
from vllm_repro.cli.options import add_run_options, job_from, resumed
from vllm_repro.cli.server_options import add_server_options, server_options
from vllm_repro.errors import INTERRUPTED, UsageError
from vllm_repro.running.folders import with_out
from vllm_repro.running.job import Job, choice_of, repeat_command
from vllm_repro.scenario.catalogue import find, find_arms
from vllm_repro_search.boot_search import BootSearch, UnfinishedSearch, read_search
from vllm_repro_search.record import SearchRecord, terminal

__all__ = [
    "add_limits",
    "add_search",
    "begun",
    "common_fields",
    "job_of_one_arm",
    "run_search",
    "stream_of",
]


def add_search(parser: argparse.ArgumentParser, *, example: str, prints: str, more: str) -> None:
    """Add the options of a search that boots one arm of a scenario.

    For the texts see `add_common`.
    """
    add_common(parser, example=example, prints=prints, more=more)
    parser.add_argument(
        "scenario", nargs="?", metavar="SCENARIO", help="may be left out with --resume"
    )
    add_limits(parser)
    add_server_options(parser, which=("server", "image", "vllm", "model", "weights"))
    add_run_options(parser, arm="this arm instead of the first", trials=False)


def job_of_one_arm(arguments: argparse.Namespace, verb: str) -> Job:
    """Return the job of a command line with `add_search`. Raises `UsageError`."""
    if not arguments.scenario:
        raise UsageError(
            "no SCENARIO is named", hint=f"vllm-repro list names them; vllm-repro {verb} --help"
        )
    scenario = find(arguments.scenario)
    arms = find_arms(scenario, arguments.arm or [scenario.arms[0].name])
    if len(arms) != 1:
        raise UsageError(
            f"{len(arms)} arms are named, and this follows one", hint="give --arm once"
        )
    options = server_options(arguments)
    choice = choice_of(scenario, options)
    # boots of different kinds of server are not comparable
    options = replace(options, server=choice.kind.value)
    job = job_from(
        arguments,
        name=arguments.scenario,
        scenario=scenario,
        options=options,
        choice=choice,
        arms=arms,
    )
    job = replace(job, named_arms=[arms[0].name])
    release = ("--vllm", options.vllm or job.version(choice.kind))
    return replace(job, reproduce=repeat_command(verb, job, choice.kind, release))


def common_fields(job: Job, reproduce: str) -> dict[str, Any]:
    """Return the fields of a `SearchRecord` for a search that has not begun."""
    scenario, kind = job.scenario, job.choice.kind
    return {
        "scenario": scenario.id,
        "issue": scenario.issue,
        "title": scenario.title,
        "status": scenario.status,
        "server": kind.value,
        "evidence": kind.facts.evidence,
        "harness_version": __version__,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "duration_s": 0.0,
        "reproduce": reproduce,
    }


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add `--max-boots`, `--max-time` and `--resume`."""
    parser.add_argument(
        "--max-boots", type=_boots, metavar="N", help="stop after so many boots, with what is known"
    )
    parser.add_argument(
        "--max-time",
        type=duration,
        metavar="TIME",
        help="start no boot after this time: 90s, 30m or 2h",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help=(
            "continue the search in this folder with its options: --max-boots and --max-time may be"
            " given anew"
        ),
    )


def begun(
    arguments: argparse.Namespace,
    kind: type[SearchRecord],
    *,
    beside: Collection[str] = ("max_boots", "max_time"),
) -> tuple[argparse.Namespace, UnfinishedSearch | None]:
    """Return the arguments of the first call, and the search that is resumed.

    The options `beside` are those of this call. Raises `UsageError`.
    """
    if not arguments.resume:
        return arguments, None
    unfinished = read_search(arguments.resume, kind)
    anew = {name: getattr(arguments, name) for name in beside if name in arguments}
    arguments = resumed(arguments, unfinished, beside=anew)
    vars(arguments).update(anew)
    return arguments, unfinished


def run_search(
    arguments: argparse.Namespace, search: BootSearch[Any, Any], unfinished: UnfinishedSearch | None
) -> int:
    """Run or resume a search, print its text, and return the exit status."""
    if unfinished is not None:
        search.resume(unfinished)
    limits = (getattr(arguments, "max_boots", None), getattr(arguments, "max_time", None))
    folder = search.run(*limits, lambda line: print(line, file=stream_of(arguments), flush=True))
    record: SearchRecord = search.record
    script = ["--script", arguments.script] if getattr(arguments, "script", None) else []
    resume = shlex.join(["vllm-repro", record.verb, "--resume", str(folder), *script])
    shown = structs.replace(record, reproduce=with_out(record.reproduce, search.job.out))
    print(
        f"\n{terminal(shown, f'{folder / record.file}.md', resume)}",
        end="",
        file=stream_of(arguments),
    )
    if arguments.json:
        print_json(record.as_dict())
    return (
        INTERRUPTED if record.stopped and record.stopped.startswith("SIG") else record.exit_status
    )


def stream_of(arguments: argparse.Namespace) -> TextIO:
    """Return where text goes: with `--json` the standard output holds JSON alone."""
    return sys.stderr if arguments.json else sys.stdout


def _boots(text: str) -> int:
    return number(text, least=1, most=1_000, what="number of boots")
