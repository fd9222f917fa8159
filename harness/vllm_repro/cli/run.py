"""`vllm-repro run`: the main job."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import shutil
import sys
from pathlib import Path

from vllm_repro.catalogue import find, find_arms
from vllm_repro.cli.common import Subparsers, print_json, verb
from vllm_repro.cli.options import add_server_options, number, seconds, server_options
from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.leftovers import sweep
from vllm_repro.report.model import RunReport, banner
from vllm_repro.run import Plan, default_out, on_record
from vllm_repro.run import run as run_plan
from vllm_repro.scenario import Scenario
from vllm_repro.servers.attach import identify
from vllm_repro.servers.base import ServerKind
from vllm_repro.site import Choice, Options, choose, open_site
from vllm_repro.terminal import Progress, summary
from vllm_repro.verdict import Expect, bisect_status, exit_status
from vllm_repro.watch import Patience

INTERRUPTED = 130
_NAMED = (ServerKind.REHEARSAL, ServerKind.LAB)
"""Kinds that run the release which the scenario names, where the command line names none."""


def add(subparsers: Subparsers) -> None:
    parser = verb(
        subparsers,
        "run",
        run,
        does="boot a bug's flags, cross its boundary, watch the engine, and report what happened",
        example="vllm-repro run min-tokens-stop-ids --server process --vllm 0.28.0",
        json_output=True,
    )
    parser.add_argument("scenarios", nargs="+", metavar="SCENARIO")
    add_server_options(parser)
    parser.add_argument("--arm", action="append", metavar="A", help="only this arm; may be given again")
    parser.add_argument("--trials", type=_count, default=1, metavar="N", help="boots of each arm (default: 1)")
    parser.add_argument(
        "--expect",
        type=Expect,
        choices=list(Expect),
        default=Expect.DECLARED,
        metavar="{declared,alive,crash,any}",
        help="what exit status 0 means: the scenario's own status (default), alive, a crash, or any verdict",
    )
    parser.add_argument("--out", type=Path, help="where runs are written (default: reports)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="prompts are made from it (default: 1)")
    parser.add_argument(
        "--bisect-exit", action="store_true", help="exit as `git bisect run` wants it: 0 good, 1 bad, 125 skip"
    )
    parser.add_argument(
        "--boot-stall", type=seconds, metavar="S", help="a boot without any progress for this long has failed"
    )
    parser.add_argument(
        "--answer-stall",
        type=seconds,
        metavar="S",
        help="requests in flight without any progress for this long: a hang",
    )


def _count(text: str) -> int:
    return number(text, least=1, most=10_000, what="number of boots: at least 1")


def run(arguments: argparse.Namespace) -> int:
    scenarios = {name: find(name) for name in dict.fromkeys(arguments.scenarios)}
    reports: list[RunReport] = []
    statuses: list[int] = []
    for name, scenario in scenarios.items():
        try:
            report = run_one(name, scenario, arguments)
        except (InfraError, Unsupported) as error:
            if len(scenarios) == 1:
                raise
            # The other scenarios may well run; this one is undecided.
            print(f"vllm-repro: {scenario.id}: {error}\n  next: {error.hint}", file=sys.stderr)
            statuses.append(error.exit_status)
            continue
        reports.append(report)
        if report.interrupted:
            statuses = [INTERRUPTED]
            break
        bisected = bisect_status(report.verdict.verdict)
        statuses.append(bisected if arguments.bisect_exit else exit_status(report.verdict.expected))
    if arguments.json:
        print_json(reports[0].as_json() if len(scenarios) == 1 else [report.as_json() for report in reports])
    # A surprise outweighs an undecided run, which outweighs an expected one.
    return min((status for status in statuses if status), default=0)


def run_one(name: str, scenario: Scenario, arguments: argparse.Namespace) -> RunReport:
    """One scenario's run, with its first line and its table on the terminal."""
    progress = Progress()
    options = server_options(arguments)
    arms = find_arms(scenario, arguments.arm)
    choice = _choice(scenario, options)
    _refuse_idle_options(options, choice.kind)
    rehearsal_url = False
    if choice.kind is ServerKind.ATTACH:
        if not options.url:
            raise UsageError("--server attach needs a URL", hint="--url http://127.0.0.1:8000")
        _, rehearsal_url = asyncio.run(identify(options.url))
    for line in sweep():
        progress.line(f"left by a killed run, removed: {line}")
    site, why = open_site(scenario, options, choice, progress.line, rehearsal_url=rehearsal_url)
    kind = site.kind
    version = options.vllm or (scenario.try_with if kind in _NAMED else None)
    said = sys.stderr if arguments.json else sys.stdout
    first = banner(site.evidence, options.vllm or scenario.try_with if site.evidence == "rehearsal" else version)
    print(f"{first + ' ' if first else ''}Server: {kind}{f', because {why}' if why else ''}.", file=said, flush=True)
    defaults = Patience()
    plan = Plan(
        scenario,
        arms,
        arguments.trials,
        site,
        arguments.expect,
        Patience(
            defaults.boot_stall if arguments.boot_stall is None else arguments.boot_stall,
            defaults.answer_stall if arguments.answer_stall is None else arguments.answer_stall,
        ),
        arguments.seed,
        arguments.out or default_out(),
        _again(name, scenario, arguments, kind),
        version,
        os.environ.get("VLLM_API_KEY"),
    )
    record = on_record(plan.out, scenario, site.evidence)
    try:
        report = run_plan(plan, progress.say, progress.done, record)
    finally:
        progress.close()
    print("\n" + summary(report), file=said)
    return report


def _choice(scenario: Scenario, options: Options) -> Choice:
    return choose(scenario, options) if options.server == "auto" else Choice(ServerKind(options.server), "")


def _program() -> str:
    """How the command can be called again: by its name, or by where it lies when the name is on no path."""
    if shutil.which("vllm-repro"):
        return "vllm-repro"
    here = Path(sys.argv[0])
    return os.path.relpath(here) if here.name == "vllm-repro" else "python -m vllm_repro"


def _refuse_idle_options(options: Options, kind: ServerKind) -> None:
    """An option that the chosen server does not look at would be obeyed in the caller's mind only."""
    for flag, value, kinds in (
        ("--url", options.url, {ServerKind.ATTACH}),
        ("--log", options.log, {ServerKind.ATTACH}),
        ("--image", options.image, {ServerKind.DOCKER}),
    ):
        if value is not None and kind not in kinds:
            raise UsageError(
                f"{flag} has no meaning with --server {kind}",
                hint=f"leave it out, or use --server {' or '.join(kinds)}",
            )


def _again(name: str, scenario: Scenario, arguments: argparse.Namespace, kind: ServerKind) -> str:
    """One command that repeats this run, with what `auto` picked written out."""
    words = [_program(), "run", name if name.endswith(".py") else scenario.id, "--server", kind.value]
    version = arguments.vllm or (scenario.try_with if kind in _NAMED else None)
    for flag, value in (
        ("--url", arguments.url),
        ("--image", arguments.image),
        ("--vllm", version),
        ("--model", arguments.model),
        ("--weights", arguments.weights),
        ("--boot-stall", arguments.boot_stall),
        ("--answer-stall", arguments.answer_stall),
    ):
        if value:
            words += [flag, str(value)]
    for arm in arguments.arm or ():
        words += ["--arm", arm]
    if arguments.trials != 1:
        words += ["--trials", str(arguments.trials)]
    words += ["--seed", str(arguments.seed)]
    return shlex.join(words)
