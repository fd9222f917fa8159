"""`vllm-repro causes`: the changes of vLLM that bring a bug, and those that protect from it."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from vllm_repro.cli.common import add_common, number, print_json
from vllm_repro.cli.source_option import WITH_OPTION, exchanged
from vllm_repro.errors import InfraError, Unsupported, UsageError
from vllm_repro.releases.disk import cache_root
from vllm_repro.releases.overlay import make_overlay
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source
from vllm_repro.report.format import columns, plural
from vllm_repro.report.model import RunReport
from vllm_repro.running.folders import default_out
from vllm_repro.running.job import Job, choice_of, refuse_unused_options
from vllm_repro.running.run import run_one
from vllm_repro.running.terminal import Progress
from vllm_repro.scenario.catalogue import find, folder_words
from vllm_repro.scenario.scenario import Arm, Cause, Causes, Scenario
from vllm_repro.servers.kinds import kinds
from vllm_repro.servers.options import ServerOptions
from vllm_repro.verdict.statistics import excluded_rate, fisher
from vllm_repro.verdict.verdict import Expect, Expected, Standing, exit_status
from vllm_repro_diagnosis.boot_facts import imported
from vllm_repro_diagnosis.log_text import read_lines
from vllm_repro_explore.case import Case, Request, Setup
from vllm_repro_explore.driver import Driver, driver_model
from vllm_repro_explore.finding import FindingKind, PlayResult
from vllm_repro_explore.scenario_setup import setup_from

_EPILOG = """

exit status:
  0  every change does what the scenario declares
  1  a surprise: one that should protect does not, or the other way round
  2  undecided: a change does not fit its release, or a release cannot be tried
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted

The changes are declared in the scenario's file, causes=Causes(…): small edits of a release's own
source, each made in that release alone. With prompts=… each is tried on vLLM's own EngineCore,
without a server and a model, with the same workloads; else on a server of the lab, or of --server,
with the scenario's workload."""


_NUMBER = partial(number, least=1, most=1_000_000, what="number of workloads")


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm-repro causes`."""
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
    words = WITH_OPTION["help"].replace("the vLLM that --vllm names", "each release")
    parser.add_argument("--with", **WITH_OPTION | {"help": words})


def run(arguments: argparse.Namespace) -> int:
    """Run `vllm-repro causes`: try each change, print the table, return the exit status.

    On servers, each change also writes a run below `--out`. Raises `UsageError` if the scenario
    declares no changes, and `Unsupported` if a release cannot be tried.
    """
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
    packages = getattr(arguments, "with") or []
    words += [word for package in packages for word in ("--with", package)]
    stream = sys.stderr if arguments.json else sys.stdout
    make: Callable[[Cause], CauseRow]
    if serverless:
        seeds = range(arguments.seed, arguments.seed + trials)
        make = partial(_try_on_engine, scenario, scenario.causes, seeds, Progress(), packages)
        evidence, where = "engine", "on vLLM's own EngineCore: no server, no model"
    else:
        options = ServerOptions(server=arguments.server or ("lab" if scenario.lab else "auto"))
        choice = choice_of(scenario, options)
        if "patch" not in choice.kind.facts.options:
            raise Unsupported(
                "a rehearsal runs no vLLM that could be changed",
                hint="vllm-repro doctor shows which servers can run here",
            )
        if packages:
            vllm = exchanged(Source(release=scenario.causes.changes[0].release), packages)
            refuse_unused_options(replace(options, vllm=vllm), choice.kind)
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
        make = partial(_try_on_servers, job, Progress(), packages)
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
    """Try all changes; return all rows, and those of unchanged releases by (release, arm).

    The row of an unchanged release comes before those of its changes. make: tries one change, and
    returns its row.
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
    """Return `cause` without its patches: the unchanged release, to compare the changes with.

    Expected: its engine dies if the arm's status declares the release bad, else it lives.
    """
    standing = scenario.status_of(_arm(scenario, cause)).standing(cause.release)
    expected = Expected.DIES if standing is Standing.BAD else Expected.LIVES
    return replace(cause, name="as released", patches=(), expected=expected, believed="")


def _arm(scenario: Scenario, cause: Cause) -> Arm:
    """Return the scenario's arm that a change is tried on."""
    arm = scenario.arm(cause.arm)
    assert arm is not None, "a scenario is checked for that"
    return arm


def _try_on_engine(
    scenario: Scenario,
    causes: Causes,
    seeds: range,
    progress: Progress,
    packages: Sequence[str],
    cause: Cause,
) -> CauseRow:
    """Run each seed's workload on EngineCore with one change; return the change's row.

    The row has 0 trials if no patched file was imported. Raises `Unsupported` if vLLM does not
    start with the change.
    """
    progress.notify(f"{cause.release}: {cause.name}")
    release = provision(exchanged(Source(release=cause.release), packages), progress.line)
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
                row = play_change(cause, cases, driver.play)
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


def _try_on_servers(
    job: Job, progress: Progress, packages: Sequence[str], cause: Cause
) -> CauseRow:
    """Run `job` on servers with one change of vLLM's source; return the row of its trials.

    The row has 0 trials if the run raised `InfraError` or `Unsupported`. Raises
    `KeyboardInterrupt` if the run was interrupted.
    """
    progress.line(f"{cause.release}: {cause.name}")
    arm = _arm(job.scenario, cause)
    changed = replace(arm, patches=(*arm.patches, *cause.patches))
    vllm = exchanged(Source(release=cause.release), packages)
    options = ServerOptions(server=job.choice.kind.value, vllm=vllm)
    job = replace(job, options=options, arms=[changed], named_arms=[changed.name])
    try:
        report = run_one(job, progress)
    except (InfraError, Unsupported) as error:
        progress.line(f"  {error.with_hint}")
        return CauseRow(cause=cause, trials=0, died=0)
    if report.interrupted:
        raise KeyboardInterrupt(report.interrupted)
    return row_of_run(cause, report)


_LISTED = "store-listed-twice"
_SURE = 0.01
"""Largest p-value of Fisher's test at which a change counts as having an effect."""
_FEW = 5
"""With fewer trials than this, Fisher's test cannot reach `_SURE`: only all-or-none is read."""
_SURPRISE = {True: "", False: "  A SURPRISE", None: "  UNDECIDED"}


@dataclass(frozen=True, kw_only=True)
class CauseRow:
    """Result of one change of vLLM's source: how many trials crashed, and where."""

    cause: Cause
    # conclusive trials; 0 if the change was not tested
    trials: int
    # trials that crashed
    died: int
    # trials in which a transfer listed a block twice; None on servers, which do not log it
    listed: int | None = None
    # where they crashed; on servers the names of the exceptions
    sites: tuple[str, ...] = ()
    # folder name of the run on servers
    run: str | None = None

    @property
    def as_expected(self) -> bool | None:
        """Return True if the engine died, or lived, as declared; None without conclusive trials."""
        return (self.died > 0) == (self.cause.expected is Expected.DIES) if self.trials else None

    def as_json(self) -> dict[str, Any]:
        """Return the row as a JSON object of `vllm-repro causes --json`."""
        cause = self.cause
        return {
            "change": cause.name,
            "release": cause.release,
            "arm": cause.arm,
            "files": sorted({patch.file for patch in cause.patches}),
            "expected": cause.expected.value,
            "n": self.trials,
            "died": self.died,
            "listed_twice": self.listed,
            "sites": list(self.sites),
            "as_expected": self.as_expected,
            "run": self.run,
        }


def case_of(causes: Causes, setup: Setup, seed: int) -> Case:
    """Return the case of a seed: a workload as `causes` declares, the same for every change."""
    assert causes.prompts is not None, "a server has the workload of its arm"
    rng = Random(seed)
    blocks, over = causes.prompts.ranges
    length = rng.randint(*blocks) * setup.block + rng.randint(*over)
    return Case.numbered(setup, [[Request(length, causes.answer)]] * causes.requests, seed)


def play_change(
    cause: Cause, cases: Sequence[Case], play: Callable[[Case], PlayResult]
) -> CauseRow:
    """Run the cases on EngineCore with one change; return the change's row.

    play: runs a case with the change. Raises `ValueError` if vLLM refuses to start.
    """
    died = listed = 0
    sites: dict[str, None] = {}
    for case in cases:
        outcome = play(case)
        if outcome.invalid:
            raise ValueError(outcome.invalid)
        deaths = [finding for finding in outcome.findings if finding.kind is FindingKind.DEATH]
        died += bool(deaths)
        listed += any(finding.site == _LISTED for finding in outcome.findings)
        sites |= dict.fromkeys(finding.site for finding in deaths)
    return CauseRow(cause=cause, trials=len(cases), died=died, listed=listed, sites=tuple(sites))


def row_of_run(cause: Cause, report: RunReport) -> CauseRow:
    """Return a change's row from the report of its run; its counts omit inconclusive trials."""
    (arm,) = report.arms
    sites = dict.fromkeys(
        trial.death.exception for trial in arm.trials if trial.death and trial.death.exception
    )
    run = report.folder.name
    return CauseRow(cause=cause, trials=arm.n, died=arm.k, sites=tuple(sites), run=run)


def reading(row: CauseRow, released: CauseRow) -> str:
    """Return in words what a change does to its release.

    Fisher's exact test compares its crashes with those of `released`, the unchanged release.
    """
    if row.cause == released.cause:
        return "as released"
    if not row.trials or not released.trials:
        return "unknown: no conclusive trial with it, or without it"
    more, fewer = (row, released) if row.died >= released.died else (released, row)
    clear = fisher(more.died, more.trials, fewer.died, fewer.trials) <= _SURE
    if min(row.trials, released.trials) < _FEW and more.died:
        if more.died < more.trials or 0 < fewer.died < fewer.trials:
            return "too few trials to tell"
        clear = clear or not fewer.died
    if not clear:
        believed = row.cause.believed
        return (
            f"does not protect, though {believed}" if believed else "changes nothing that was seen"
        )
    if row.died > released.died:
        return "brings the crash back"
    return "protects in part" if row.died else "protects"


def lines(rows: Sequence[CauseRow], released: dict[tuple[str, str], CauseRow]) -> list[str]:
    """Return the table of `vllm-repro causes` as text lines, one row per item of `rows`.

    released: rows of unchanged releases by (release, arm). If a row has no crash, a last line
    bounds the true crash rate.
    """
    servers = any(row.listed is None for row in rows)  # they do not log which blocks are listed
    heads = ("release", "server", "change", "die", *(() if servers else ("list twice",)), "reading")
    table = [heads]
    for row in rows:
        cause, listed = row.cause, () if servers else (f"{row.listed}",)
        read = reading(row, released[cause.release, cause.arm]) + _SURPRISE[row.as_expected]
        died = f"{row.died} of {row.trials}"
        table.append((cause.release, cause.arm, cause.name, died, *listed, read))
    text = [*columns(table, [8, 16, 64, 12, *(() if servers else (10,)), 80]), ""]
    if quiet := min((row.trials for row in rows if row.trials and not row.died), default=0):
        unit = "boots" if servers else "such workloads"
        text.append(
            f"0 crashes in {quiet} {unit}: the true rate is below {excluded_rate(quiet):.0%} (95 %"
            " confidence)"
        )
    return text
