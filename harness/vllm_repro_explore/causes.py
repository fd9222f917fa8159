"""`vllm-repro causes`: the changes of vLLM that bring a bug, and those that protect from it."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from vllm_repro.cli.common import add_common, number, print_json
from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.releases.disk import cache_root
from vllm_repro.releases.overlay import make_overlay
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source
from vllm_repro.report.format import plural
from vllm_repro.running.folders import default_out
from vllm_repro.running.job import Job, choice_of
from vllm_repro.running.run import run_one
from vllm_repro.running.terminal import Progress
from vllm_repro.scenario.catalogue import find, folder_words
from vllm_repro.scenario.scenario import Arm, Cause, Causes, Scenario
from vllm_repro.servers.kinds import kinds
from vllm_repro.servers.options import ServerOptions
from vllm_repro.verdict.verdict import Expect, Expected, Standing, exit_status
from vllm_repro_diagnosis.boot_facts import imported
from vllm_repro_diagnosis.log_text import read_lines
from vllm_repro_explore.cause_rows import CauseRow, booted, case_of, lines, tried
from vllm_repro_explore.driver import Driver, driver_model
from vllm_repro_explore.scenario_setup import setup_from

_EPILOG = """

exit status:
  0  every change does what the scenario declares
  1  a surprise: one that should protect does not, or the other way round
  2  undecided: a change does not fit its release, or a release cannot be tried
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted

The changes are declared in the scenario's file, causes=Causes(…): small edits of a release's own\
 source, each made in
that release alone. With prompts=… each is tried on vLLM's own EngineCore, without a server and a\
 model,
with the same workloads; else on a server of the lab, or of --server, with the scenario's\
 workload."""


_NUMBER = partial(number, least=1, most=1_000_000, what="number of workloads")


def add(parser: argparse.ArgumentParser) -> None:
    add_common(
        parser,
        example="vllm-repro causes sco-hybrid --trials 100",
        prints="a row for each release and each change of it",
        more=_EPILOG,
    )
    parser.add_argument("scenario", metavar="SCENARIO")
    parser.add_argument(
        "--trials",
        type=_NUMBER,
        metavar="N",
        help=(
            "workloads for each change (default: 100), or boots where servers are booted"
            " (default: 1)"
        ),
    )
    parser.add_argument(
        "--seed", type=_NUMBER, default=1, metavar="K", help="the first seed (default: 1)"
    )
    parser.add_argument(
        "--server",
        choices=("auto", *kinds(lambda facts: "patch" in facts.options)),
        help=(
            "where servers come from, if any are booted (default: the lab, or auto for a scenario"
            " that has none)"
        ),
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where their runs are written (default: reports)"
    )


def run(arguments: argparse.Namespace) -> int:
    scenario = find(arguments.scenario)
    if scenario.causes is None:
        raise UsageError(
            f"{scenario.id} names no changes to try",
            hint=(
                "causes=Causes(…) in its file; vllm-repro run … --patch tries one change of yours"
                " on a real server"
            ),
        )
    serverless = scenario.causes.prompts is not None
    if serverless and arguments.server:
        raise UsageError(
            f"the changes of {scenario.id} are tried on vLLM's EngineCore alone, which has no"
            " server",
            hint=(
                "leave --server out; vllm-repro run … --patch tries one change of yours on a real"
                " server"
            ),
        )
    trials = arguments.trials or (100 if serverless else 1)
    words = ["vllm-repro", "causes", arguments.scenario, *folder_words()]
    words += ["--trials", f"{trials}", "--seed", f"{arguments.seed}"]
    stream = sys.stderr if arguments.json else sys.stdout
    make: Callable[[Cause], CauseRow]
    if serverless:
        seeds = range(arguments.seed, arguments.seed + trials)
        make = partial(_on_engine, scenario, scenario.causes, seeds, Progress())
        evidence, where = "engine", "on vLLM's own EngineCore: no server, no model"
    else:
        options = ServerOptions(server=arguments.server or ("lab" if scenario.lab else "auto"))
        choice = choice_of(scenario, options)
        if "patch" not in choice.kind.facts.options:
            raise Unsupported(
                "a rehearsal runs no vLLM that could be changed",
                hint="vllm-repro doctor shows which servers can run here",
            )
        evidence = choice.kind.value
        words += ["--server", evidence]
        job = Job(
            name=arguments.scenario,
            scenario=scenario,
            options=options,
            choice=choice,
            arms=[],
            named_arms=[],
            trials=trials,
            seed=arguments.seed,
            out=arguments.out or default_out(),
            expect=Expect.ANY,
            reproduce=shlex.join(words),
        )
        make = partial(_on_servers, job, Progress())
        where = f"{plural(trials, 'boot')} of each, {choice.kind} servers"
    again = shlex.join(words)
    print(f"{scenario.id}   {scenario.issue}   causes, {where}", file=stream, flush=True)
    rows, released = _rows(scenario, scenario.causes, make)
    print("\n" + "\n".join(lines(rows, released)) + f"\nagain: {again}", file=stream)
    if arguments.json:
        result = {"schema": 1, "scenario": scenario.id, "evidence": evidence}
        print_json(result | {"rows": [row.as_json() for row in rows], "reproduce": again})
    answers = [row.as_expected for row in rows]
    return exit_status(False if False in answers else None if None in answers else True)


def _rows(
    scenario: Scenario, causes: Causes, make: Callable[[Cause], CauseRow]
) -> tuple[list[CauseRow], dict[tuple[str, str], CauseRow]]:
    """Return all rows, and the rows as released by (release, arm).

    The row of a release as released comes before those of its changes.
    """
    rows: list[CauseRow] = []
    released: dict[tuple[str, str], CauseRow] = {}
    for cause in causes.changes:
        place = cause.release, cause.arm
        if place not in released:
            released[place] = make(_as_released(scenario, cause))
            rows.append(released[place])
        rows.append(make(cause))
    return rows, released


def _as_released(scenario: Scenario, cause: Cause) -> Cause:
    """Return the trial of the release of `cause` without any change.

    Without a declared bug its engine should live.
    """
    standing = scenario.status_of(_arm(scenario, cause)).standing(cause.release)
    expected = Expected.DIES if standing is Standing.BAD else Expected.LIVES
    return replace(cause, name="as released", patches=(), expected=expected, believed="")


def _arm(scenario: Scenario, cause: Cause) -> Arm:
    arm = scenario.arm(cause.arm)
    assert arm is not None, "a scenario is checked for that"
    return arm


def _on_engine(
    scenario: Scenario, causes: Causes, seeds: range, progress: Progress, cause: Cause
) -> CauseRow:
    """Play the workloads of the seeds on EngineCore with one change."""
    progress.notify(f"{cause.release}: {cause.name}")
    release = provision(Source(release=cause.release), progress.line)
    patched: Mapping[str, str] = {}
    if cause.patches:
        overlay = make_overlay(cache_root(), release.packages, cause.patches, progress.line)
        release, patched = replace(release, packages=overlay.folder), overlay.digests
    setup = setup_from(scenario, _arm(scenario, cause))
    cases = [case_of(causes, setup, seed) for seed in seeds]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "driver.log"
        with Driver(release, driver_model(), log, patched=patched) as driver:
            try:
                row = tried(cause, cases, driver.play)
            except ValueError as error:
                raise Unsupported(
                    f"vLLM {cause.release} does not start with {cause.name!r}: {error}"
                ) from error
        if patched and not patched.keys() & imported(read_lines(log.read_bytes())):
            progress.line(f"  not tested: the search does not load {', '.join(patched)}")
            row = CauseRow(cause=cause, trials=0, died=0)
    progress.line(f"  {cause.release} {cause.name}: {row.died} of {row.trials} die")
    progress.close()
    return row


def _on_servers(job: Job, progress: Progress, cause: Cause) -> CauseRow:
    """Run `job` with one change, in a folder of its own."""
    progress.line(f"{cause.release}: {cause.name}")
    arm = _arm(job.scenario, cause)
    changed = replace(arm, patches=(*arm.patches, *cause.patches))
    options = ServerOptions(server=job.choice.kind.value, vllm=Source(release=cause.release))
    job = replace(job, options=options, arms=[changed], named_arms=[changed.name])
    try:
        report = run_one(job, progress)
    except (InfraError, Unsupported) as error:
        progress.line(f"  {error.with_hint}")
        return CauseRow(cause=cause, trials=0, died=0)
    if report.interrupted:
        raise KeyboardInterrupt(report.interrupted)
    return booted(cause, report)
