"""One scenario's run, as the user asked for it.

Shared by the command line, the sweep, the night and pytest.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vllm_repro.errors import UsageError
from vllm_repro.releases.known import compiled_parts
from vllm_repro.releases.sources import Source
from vllm_repro.running.state import MeasureOptions, TimeLimits
from vllm_repro.scenario.patch import read_diff
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.kinds import ServerKind, kinds
from vllm_repro.servers.multi_node import Nodes
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import ServerChoice, choose
from vllm_repro.verdict.verdict import Expect, Expected
from vllm_repro_diagnosis.evidence import Evidence, banner

if TYPE_CHECKING:  # they import the reports
    from vllm_repro.report.model import RunReport
    from vllm_repro.running.resume import UnfinishedRun
    from vllm_repro.running.terminal import Progress

MOST_TRIALS = 200
"""Most boots of an arm that a caller may ask for."""


class SiteFacts(Protocol):
    """Facts about the place of a run's servers, read before the first one starts."""

    @property
    def kind(self) -> ServerKind:
        """Kind of server, such as docker or process."""

    @property
    def evidence(self) -> Evidence:
        """Kind of evidence that its runs give: a GPU, a CPU or a rehearsal."""

    @property
    def version(self) -> str | None:
        """Release that a server running already reports; None without one."""


Chosen = Callable[[SiteFacts, str], None]
"""Called with the facts of the site and why it was chosen, before anything is fetched or booted."""


class Elsewhere(Protocol):
    """Other machines, such as a cluster, that run jobs in place of this one."""

    def run(
        self, job: Job, progress: Progress, chosen: Chosen, unfinished: UnfinishedRun | None
    ) -> RunReport:
        """Run the job there and return its report, as `run_one` does here."""

    def interrupt(self, name: str) -> None:
        """End all runs because of the signal `name`. Each returns its report."""

    def room(self, job: Job) -> int:
        """Return how many jobs like this one can run there at once, at least one."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to do, as the user asked for it: scenario, server options, arms, trials, folder."""

    # the scenario as the user named it: an id or a path
    name: str
    scenario: Scenario
    options: ServerOptions
    choice: ServerChoice
    # the arms to run: all of them if the user named none
    arms: Sequence[Arm]
    named_arms: Sequence[str]
    # boots of each arm; None for as many as decide its claim
    trials: int | None
    # of the generated prompts
    seed: int
    # the folder of all runs
    out: Path
    limits: TimeLimits = field(default_factory=TimeLimits)
    expect: Expect = Expect.DECLARED
    measure: MeasureOptions = field(default_factory=MeasureOptions)
    # command that repeats the run, if that is not `run`
    reproduce: str = ""
    # True to compare `arms`, which include the patches of the options (`with_patches`)
    compared: bool = False
    # absolute paths of folders with more scenarios
    folders: Sequence[str] = ()
    # where it runs; None for this machine
    elsewhere: Elsewhere | None = None
    # private names of the machine that asked, if another one runs it: lists by the keys `folders`,
    # `hosts` and `users` of a journal's first line
    private: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    # hosts of a server's further nodes; None for this machine
    others: Nodes | None = None

    def version(self, kind: ServerKind) -> str | None:
        """Return the vLLM version to run; None if the server decides it."""
        return self.options.vllm.version if self.options.vllm else kind.facts.release(self.scenario)


def choice_of(scenario: Scenario, options: ServerOptions, *, download: bool = True) -> ServerChoice:
    """Return the kind of server to use, with `auto` resolved. download: see `choose`.

    Raises `UsageError` for an unknown kind of server or of weights.
    """
    options.check()
    if options.server == "auto":
        return choose(scenario, options, download=download)
    return ServerChoice(ServerKind(options.server), "")


def usual_expectation(options: ServerOptions) -> Expect:
    """Return the expectation of a run without `--expect`.

    A patched release should live, whatever the scenario declares. Several patches are
    compared with the release as it is, which should fail.
    """
    return (Expect.DECLARED, Expect.ALIVE, Expect.CRASH)[min(len(options.patch), 2)]


def with_patches(scenario: Scenario, arms: Sequence[Arm], diffs: Sequence[Path]) -> list[Arm]:
    """Return `arms`, and for each diff one more arm: the first of them with that patch.

    The patched arm is named after its diff, and should live. Raises `UsageError` if an arm has that
    name already.
    """
    patched = list(arms)
    for path in diffs:
        name = re.sub(r"[^\w.-]+", "-", path.stem)
        if any(arm.name == name for arm in (*scenario.arms, *patched)):
            raise UsageError(
                f"two arms would have the name {name} of {path}",
                hint="rename the diff, or name it once",
            )
        patches = (*arms[0].patches, *read_diff(path))
        patched.append(
            replace(
                arms[0],
                name=name,
                expected=Expected.LIVES,
                patches=patches,
                why=f"with {path.name}",
            )
        )
    return patched


def first_line(site: SiteFacts, why: str, version: str | None) -> str:
    """Return the first output line: server kind, why it was chosen, and whether it is a simulation.

    version: the release, if the site does not know it.
    """
    cached = site.kind.facts.in_lab or (site.kind, site.evidence) == ("process", Evidence.CPU)
    compiled = compiled_parts(version) if cached else None
    first = banner(site.evidence, site.version or version, compiled)
    return f"{first + ' ' if first else ''}Server: {site.kind}{f', because {why}' if why else ''}."


def repeat_command(
    verb: str, job: Job, kind: ServerKind, release: tuple[str, Source | str | None]
) -> str:
    """Return a command line of `vllm-repro` that repeats `job`, with `--server auto` resolved.

    verb: its subcommand, such as "run". release: the flag that names releases, and its value.
    """
    options, limits, default = job.options, job.limits, TimeLimits()
    name = job.name if job.name.endswith(".py") else job.scenario.id
    words = ["vllm-repro", verb, name, "--server", kind.value]
    for flag, value in (
        ("--url", options.url),
        ("--image", options.image),
        release,
        ("--model", options.model),
        ("--weights", options.weights),
        *(("--patch", path) for path in options.patch),
        *(("--scenarios", folder) for folder in job.folders),
        (
            "--answer-stall",
            limits.answer_stall if limits.answer_stall != default.answer_stall else None,
        ),
    ):
        if value:
            words += [flag, str(value)]
    for arm in job.named_arms:
        words += ["--arm", arm]
    if job.trials != 1:
        words += ["--trials", "auto" if job.trials is None else str(job.trials)]
    if verb == "run" and job.expect is not usual_expectation(options):
        words += ["--expect", job.expect.value]
    if job.measure.outputs:
        words += ["--outputs"]
    if verb == "run" and job.measure.throughput is not None:
        words += ["--throughput" if job.measure.throughput else "--no-throughput"]
    words += ["--seed", str(job.seed)]
    return shlex.join(words)


def refuse_unused_options(options: ServerOptions, kind: ServerKind) -> None:
    """Raise `UsageError` for an option that servers of this kind do not use.

    Also for a wheel, folder or commit as `--vllm`, if they run releases only.
    """
    for name in sorted({name for server_kind in ServerKind for name in server_kind.facts.options}):
        if getattr(options, name) and name not in kind.facts.options:
            others = " or ".join(
                server_kind for server_kind in ServerKind if name in server_kind.facts.options
            )
            raise UsageError(
                f"--{name} has no meaning with --server {kind}",
                hint=f"leave it out, or use --server {others}",
            )
    if options.vllm and not options.vllm.release and not kind.facts.any_source:
        others = " or ".join(kinds(lambda facts: facts.any_source))
        raise UsageError(
            f"--server {kind} runs releases only, not {options.vllm}",
            hint=f"--server {others} runs any vLLM on the CPU",
        )
