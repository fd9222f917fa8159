"""`vllm-repro run`: the main job."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vllm_repro.cli.common import Subparsers, print_json, verb
from vllm_repro.cli.options import add_server_options, server_options, span
from vllm_repro.cli.resuming import as_begun
from vllm_repro.cli.running import (
    add_run_options,
    choice_of,
    first_line,
    job_of,
    run_one,
    usual_expectation,
)
from vllm_repro.errors import INTERRUPTED, InfraError, Unsupported, UsageError
from vllm_repro.evidence import Evidence
from vllm_repro.report.model import RunReport
from vllm_repro.running.options import Wishes
from vllm_repro.running.resume import Left, read_left
from vllm_repro.running.terminal import Progress, summary
from vllm_repro.scenario.catalogue import find, find_arms
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.site import Site
from vllm_repro.verdict.verdict import Expect, exit_status


def add(subparsers: Subparsers) -> None:
    parser = verb(
        subparsers,
        "run",
        run,
        does="boot a bug's flags, cross its boundary, watch the engine, and report what happened",
        example="vllm-repro run min-tokens-stop-ids --server process --vllm 0.28.0",
        prints="what report.json holds, of several scenarios as a list",
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="left out with --resume, if you like")
    add_server_options(parser)
    add_run_options(parser, arm="only this arm; may be given again", auto=True)
    parser.add_argument(
        "--expect",
        type=Expect,
        choices=list(Expect),
        metavar="{declared,alive,crash,any}",
        help="what exit status 0 means: the scenario's own status (default; with --patch: alive), alive, a crash, or any verdict",
    )
    parser.add_argument(
        "--throughput",
        action="store_true",
        help="measure the scenario's loads in every arm whose engine has lived through its workload",
    )
    parser.add_argument(
        "--soak", type=span, default=0.0, metavar="TIME", help="then keep a steady load up for so long: 90s, 30m, 2h"
    )
    parser.add_argument(
        "--bisect-exit", action="store_true", help="exit as `git bisect run` wants it: 0 good, 1 bad, 125 skip"
    )

    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="go on with the run in this folder that was cut; all other options are that run's",
    )
    parser.set_defaults(parser=parser)


def run(arguments: argparse.Namespace) -> int:
    left = read_left(arguments.resume) if arguments.resume else None
    if left is not None:
        arguments = _as_begun(arguments, left)
    if not arguments.scenarios:
        raise UsageError("no SCENARIO is named", hint="vllm-repro list names them; vllm-repro run --help")
    scenarios = {name: find(name) for name in dict.fromkeys(arguments.scenarios)}
    if arguments.throughput:
        for scenario in scenarios.values():
            _refuse_unmeasured(scenario, find_arms(scenario, arguments.arm))
    reports: list[RunReport] = []
    statuses: list[int] = []
    for name, scenario in scenarios.items():
        try:
            report = _run_one(name, scenario, arguments, left)
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
        bisected = report.verdict.verdict.bisect_status
        statuses.append(bisected if arguments.bisect_exit else exit_status(report.verdict.expected))
    if arguments.json:
        print_json(reports[0].as_json() if len(scenarios) == 1 else [report.as_json() for report in reports])
    # A surprise outweighs an undecided run, which outweighs an expected one.
    return min((status for status in statuses if status), default=0)


def _refuse_unmeasured(scenario: Scenario, arms: Sequence[Arm]) -> None:
    if not scenario.loads:
        raise UsageError(
            f"{scenario.id} declares no load to measure",
            hint="throughput=throughput(prompt=128, output=512, baseline=…) in the scenario's file; docs/scenarios.md",
        )
    if not any(scenario.has_own_server(arm) for arm in arms):
        names = ", ".join(arm.name for arm in scenario.arms if scenario.has_own_server(arm))
        raise UsageError(
            f"{', '.join(arm.name for arm in arms)}: the server is that of an earlier arm, which is the one to measure",
            hint=f"--arm with one of {names}",
        )


def _as_begun(arguments: argparse.Namespace, left: Left) -> argparse.Namespace:
    """The arguments that the run was begun with."""
    begun = as_begun(arguments, arguments.scenarios, left.words[1:])
    named = [find(name).id for name in arguments.scenarios]
    if named and named != [find(name).id for name in begun.scenarios]:
        raise UsageError(
            f"the run in {left.folder} is one of {begun.scenarios[0]}",
            hint=f"vllm-repro run --resume {shlex.quote(str(arguments.resume))}",
        )
    begun.out = left.folder.parent.parent
    return begun


def _run_one(name: str, scenario: Scenario, arguments: argparse.Namespace, left: Left | None) -> RunReport:
    """One scenario's run, with its first line and its table on the terminal."""
    options = server_options(arguments)
    arms = find_arms(scenario, arguments.arm)
    expect = arguments.expect or usual_expectation(options)
    job = job_of(arguments, name, scenario, options, choice_of(scenario, options), arms, expect=expect)
    job = replace(job, wishes=Wishes(arguments.throughput, arguments.soak))
    said = sys.stderr if arguments.json else sys.stdout

    def chosen(site: Site, why: str) -> None:
        named = options.vllm or scenario.try_with
        version = named if site.evidence is Evidence.REHEARSAL else job.version(site.kind)
        print(first_line(site, why, version), file=said, flush=True)

    report = run_one(job, Progress(), chosen, left)
    print("\n" + summary(report), file=said)
    return report
