"""What the verbs that boot servers share: their options, and one scenario's run from the command line to its report."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_repro.cli.options import number, seconds
from vllm_repro.errors import UsageError
from vllm_repro.report.model import RunReport, banner
from vllm_repro.running.options import Wishes
from vllm_repro.running.resume import Left
from vllm_repro.running.run import Plan, default_out, on_record
from vllm_repro.running.run import run as run_plan
from vllm_repro.running.terminal import Progress
from vllm_repro.running.watch import Patience
from vllm_repro.scenario.patch import read_diff
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.orphans import sweep
from vllm_repro.servers.site import ServerChoice, Site, choose, open_site
from vllm_repro.verdict.verdict import Expect

__all__ = [
    "Job",
    "add_run_options",
    "again",
    "choice_of",
    "first_line",
    "job_of",
    "run_one",
    "usual_expectation",
]


@dataclass(frozen=True)
class Job:
    """One scenario's run as the command line asks for it.

    name: the scenario as it was named there. named_arms: the arms that were named; `arms` are all of them where none was. Stalls in
    seconds, None for the default of `Patience`. trials: None for as many boots as decide each arm's claim. reproduce: the command that
    repeats it, where that is not `run`.
    """

    name: str
    scenario: Scenario
    options: ServerOptions
    choice: ServerChoice
    arms: Sequence[Arm]
    named_arms: Sequence[str]
    trials: int | None
    seed: int
    out: Path
    boot_stall: float | None
    answer_stall: float | None
    expect: Expect = Expect.DECLARED
    wishes: Wishes = field(default_factory=Wishes)
    reproduce: str = ""

    @property
    def patience(self) -> Patience:
        default = Patience()
        return Patience(
            default.boot_stall if self.boot_stall is None else self.boot_stall,
            default.answer_stall if self.answer_stall is None else self.answer_stall,
        )

    def version(self, kind: ServerKind) -> str | None:
        """The release that is asked for; None where the server decides."""
        return self.options.vllm or kind.facts.release(self.scenario)


def add_run_options(parser: argparse.ArgumentParser, *, arm: str, auto: bool = False) -> None:
    """The options of every verb that boots servers; `arm` says what `--arm` means there, `auto` whether `--trials auto` is known."""
    parser.add_argument("--arm", action="append", metavar="A", help=arm)
    parser.add_argument(
        "--trials",
        type=_count_or_auto if auto else _count,
        default=1,
        metavar="N|auto" if auto else "N",
        help="boots of each arm (default: 1)" + ("; auto: as many as decide what can be said of it" if auto else ""),
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where runs are written (default: reports)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="prompts are made from it (default: 1)")
    parser.add_argument(
        "--boot-stall", type=seconds, metavar="S", help="a boot without any progress for this long has failed"
    )
    parser.add_argument(
        "--answer-stall",
        type=seconds,
        metavar="S",
        help="requests in flight without any progress for this long: a hang",
    )


def _count_or_auto(text: str) -> int | None:
    return None if text == "auto" else _count(text)


def _count(text: str) -> int:
    return number(text, least=1, most=10_000, what="number of boots: at least 1")


def job_of(
    arguments: argparse.Namespace,
    name: str,
    scenario: Scenario,
    options: ServerOptions,
    choice: ServerChoice,
    arms: Sequence[Arm],
    *,
    expect: Expect = Expect.DECLARED,
) -> Job:
    """A `Job` from the parsed `add_run_options`. Raises `UsageError` for an option that the chosen server does not look at."""
    _refuse_idle_options(options, choice.kind)
    return Job(
        name,
        scenario,
        options,
        choice,
        arms,
        arguments.arm or (),
        arguments.trials,
        arguments.seed,
        arguments.out or default_out(),
        arguments.boot_stall,
        arguments.answer_stall,
        expect,
    )


def usual_expectation(options: ServerOptions) -> Expect:
    """What a run that names no `--expect` is held against. Whoever lays a patch over a release wants to see it live, and the scenario's
    status is about the release as it is."""
    return Expect.ALIVE if options.patch else Expect.DECLARED


def choice_of(scenario: Scenario, options: ServerOptions) -> ServerChoice:
    """The kind of server, `auto` resolved."""
    return choose(scenario, options) if options.server == "auto" else ServerChoice(ServerKind(options.server), "")


def first_line(site: Site, why: str, version: str | None) -> str:
    """What the servers of a run are, and why those; a simulation says that it is one."""
    first = banner(site.evidence, version)
    return f"{first + ' ' if first else ''}Server: {site.kind}{f', because {why}' if why else ''}."


def run_one(job: Job, progress: Progress, chosen: Callable[[Site, str], None], left: Left | None = None) -> RunReport:
    """Runs `job`, or what is `left` of it, and writes its reports.

    `chosen` is told the site and why it is that one, before anything is fetched or booted.

    Raises `UsageError`, `InfraError` or `Unsupported` where no server can be had; then there is no run's folder.
    """
    for line in sweep():
        progress.line(f"left by a killed run, removed: {line}")
    site = open_site(job.scenario, job.options, job.choice, progress.line, chosen=chosen)
    arms = job.arms if job.named_arms else site.usual_arms(job.scenario, job.arms)
    if len(arms) < len(job.arms):
        others = ", ".join(arm.name for arm in job.arms if arm not in arms)
        progress.line(f"{len(arms)} of {len(job.arms)} arms; --arm all runs these too: {others}")
    if job.options.patch and not job.named_arms:
        arms = [arm for arm in arms if not arm.patches]  # a fix of their own would lie in the way of this one
    if job.options.patch:
        extra = read_diff(job.options.patch)
        arms = [replace(arm, patches=(*arm.patches, *extra)) for arm in arms]
    version = job.version(site.kind)
    plan = Plan(
        job.scenario,
        arms,
        job.trials,
        site,
        job.expect,
        job.patience,
        job.seed,
        job.out,
        job.reproduce or again("run", job, site.kind, ("--vllm", version)),
        version,
        os.environ.get("VLLM_API_KEY"),
        job.wishes,
    )
    try:
        return run_plan(
            plan,
            progress.say,
            progress.done,
            on_record(plan.out, job.scenario, site.evidence, arms, version),
            left,
        )
    finally:
        progress.close()


def again(verb: str, job: Job, kind: ServerKind, release: tuple[str, str | None]) -> str:
    """One command that repeats this, with what `auto` picked written out, and the program by its name, wherever it lies here.

    release: the flag that names releases, and its value.
    """
    options = job.options
    name = job.name if job.name.endswith(".py") else job.scenario.id
    words = ["vllm-repro", verb, name, "--server", kind.value]
    for flag, value in (
        ("--url", options.url),
        ("--image", options.image),
        release,
        ("--model", options.model),
        ("--weights", options.weights),
        ("--patch", options.patch),
        ("--boot-stall", job.boot_stall),
        ("--answer-stall", job.answer_stall),
    ):
        if value:
            words += [flag, str(value)]
    words += [flag for flag, value in (("--guard", options.guard), ("--record", options.record)) if value]
    for arm in job.named_arms:
        words += ["--arm", arm]
    if job.trials != 1:
        words += ["--trials", "auto" if job.trials is None else str(job.trials)]
    if job.expect is not usual_expectation(options):
        words += ["--expect", job.expect.value]
    if job.wishes.throughput:
        words += ["--throughput"]
    if job.wishes.soak:
        words += ["--soak", f"{job.wishes.soak:g}s"]
    words += ["--seed", str(job.seed)]
    return shlex.join(words)


def _refuse_idle_options(options: ServerOptions, kind: ServerKind) -> None:
    """Raise `UsageError` for an option that this kind of server does not read."""
    for name in sorted({name for one in ServerKind for name in one.facts.options}):
        if getattr(options, name) not in (None, False) and name not in kind.facts.options:
            others = " or ".join(one for one in ServerKind if name in one.facts.options)
            raise UsageError(
                f"--{name} has no meaning with --server {kind}", hint=f"leave it out, or use --server {others}"
            )
