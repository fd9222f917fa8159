"""`vllm-repro run`: the main job."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from vllm_repro.cli.common import add_common, print_json
from vllm_repro.cli.options import add_run_options, job_from, resumed
from vllm_repro.cli.server_options import add_server_options, server_options
from vllm_repro.errors import INTERRUPTED, InfraError, Unsupported, UsageError
from vllm_repro.running.folders import with_out
from vllm_repro.running.job import SiteFacts, choice_of, first_line, usual_expectation
from vllm_repro.running.run import run_one
from vllm_repro.running.terminal import Progress
from vllm_repro.scenario.catalogue import find, find_arms
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.verdict.verdict import Expect, exit_status
from vllm_repro_diagnosis.evidence import Evidence

if TYPE_CHECKING:  # they import the reports
    from vllm_repro.report.model import RunReport
    from vllm_repro.running.resume import UnfinishedRun

_EPILOG = """

exit status:
  0  the verdict is as expected (--expect)
  1  a surprise
  2  undecided: the boundary was not crossed, this machine cannot run it, or
     the host had trouble
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vllm-repro run` to its parser."""
    add_common(
        parser,
        example="vllm-repro run min-tokens-stop-ids --server process --vllm 0.28.0",
        prints="the content of report.json, a list for several scenarios",
        more=_EPILOG,
    )
    parser.add_argument(
        "scenarios", nargs="*", metavar="SCENARIO", help="may be left out with --resume"
    )
    add_server_options(
        parser, patch="; given several times, compare the release as it is with each of them"
    )
    add_run_options(
        parser,
        arm="only this arm; may be given again",
        auto=True,
        on="one scenario after the other",
        throughput=True,
    )
    parser.add_argument(
        "--expect",
        type=Expect,
        choices=list(Expect),
        metavar="{declared,alive,crash,any}",
        help=(
            "what exit status 0 means: the scenario's own status (default; with --patch: alive;"
            " with several: crash, and each patch lives), alive, a crash, or any verdict"
        ),
    )
    parser.add_argument(
        "--outputs",
        action="store_true",
        help=(
            "send each greedy prompt of the workload alone as well, and all of them at once; a"
            " different answer is wrong output"
        ),
    )
    parser.add_argument(
        "--bisect-exit",
        nargs="?",
        const="bug",
        choices=("bug", "fix"),
        help=(
            "exit as `git bisect run` expects: 0 good, 1 bad, 125 skip; with `fix` 0 and 1 change"
            " places, to look for the fix"
        ),
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="continue the interrupted run in this folder, with that run's options",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the named scenarios, print what happened, and return the exit status.

    With several scenarios, an `InfraError` or `Unsupported` of one is printed, and the others still
    run. An interrupt ends all.
    """
    unfinished = None
    if arguments.resume:
        from vllm_repro.running.resume import read_run  # here: it imports the reports

        unfinished = read_run(arguments.resume)
        arguments = resumed(arguments, unfinished)
    if not arguments.scenarios:
        raise UsageError(
            "no SCENARIO is named", hint="vllm-repro list names them; vllm-repro run --help"
        )
    scenarios = {name: find(name) for name in dict.fromkeys(arguments.scenarios)}
    if arguments.bisect_exit:
        for scenario in scenarios.values():
            _refuse_controls(find_arms(scenario, arguments.arm))
    reports: list[RunReport] = []
    statuses: list[int] = []
    for name, scenario in scenarios.items():
        try:
            report = _run_scenario(name, scenario, arguments, unfinished)
        except (InfraError, Unsupported) as error:
            if len(scenarios) == 1:
                raise
            # The other scenarios may still run; this one is undecided.
            print(f"vllm-repro: {scenario.id}: {error}\n  next: {error.hint}", file=sys.stderr)
            statuses.append(error.exit_status)
            continue
        reports.append(report)
        if report.interrupted:
            statuses = [INTERRUPTED]
            break
        if arguments.bisect_exit:
            bisected = report.verdict.bisect_status
            statuses.append(
                {0: 1, 1: 0}.get(bisected, bisected) if arguments.bisect_exit == "fix" else bisected
            )
        else:
            statuses.append(exit_status(report.as_expected))
    if arguments.json:
        # here: only the end of a run needs it
        from vllm_repro.report.json_report import report_dict

        print_json(
            report_dict(reports[0])
            if len(scenarios) == 1
            else [report_dict(report) for report in reports]
        )
    # A surprise outweighs an undecided run, which outweighs an expected one.
    return min((status for status in statuses if status), default=0)


def _refuse_controls(arms: Sequence[Arm]) -> None:
    """Raise `UsageError` for `--bisect-exit` if none of the arms shows the bug."""
    if not any(arm.expected.has_bug for arm in arms):
        raise UsageError(
            f"--bisect-exit: {', '.join(arm.name for arm in arms)} lives in every release, so it"
            " separates none",
            hint="name an arm that shows the bug, such as --arm reported, or leave --arm out",
        )


def _run_scenario(
    name: str, scenario: Scenario, arguments: argparse.Namespace, unfinished: UnfinishedRun | None
) -> RunReport:
    """Run one scenario, print its first line and its summary, and return its report.

    With `--json` both go to standard error. name: the scenario as typed. unfinished: the run to
    resume; None for a new one.
    """
    options = server_options(arguments)
    job = job_from(
        arguments,
        name=name,
        scenario=scenario,
        options=options,
        choice=choice_of(scenario, options),
        arms=find_arms(scenario, arguments.arm),
        expect=arguments.expect or usual_expectation(options),
        compared=len(options.patch) > 1,
    )
    stream = sys.stderr if arguments.json else sys.stdout

    def announce(site: SiteFacts, why: str) -> None:
        imitated = f"{options.vllm or scenario.try_with}"
        version = imitated if site.evidence is Evidence.REHEARSAL else job.version(site.kind)
        print(first_line(site, why, version), file=stream, flush=True)

    report = run_one(job, Progress(), announce, unfinished)
    from vllm_repro.report.summary import print_summary  # here: only the end of a run needs it

    print_summary(structs.replace(report, reproduce=with_out(report.reproduce, job.out)), stream)
    return report
