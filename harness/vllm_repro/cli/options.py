"""Options shared by the verbs that boot servers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_repro.cli.common import number, seconds, use_scenario_folders
from vllm_repro.errors import UsageError
from vllm_repro.features import additions, load
from vllm_repro.running.folders import default_out
from vllm_repro.running.job import MOST_TRIALS, Elsewhere, Job, refuse_unused_options, with_patches
from vllm_repro.running.state import MeasureOptions, TimeLimits
from vllm_repro.scenario.catalogue import find, named_folders
from vllm_repro.scenario.scenario import Arm, Scenario
from vllm_repro.servers.kinds import kinds
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import ServerChoice
from vllm_repro.verdict.verdict import Expect

if TYPE_CHECKING:  # it imports the reports, which `show` does not need
    from vllm_repro.running.resume import Unfinished


def add_run_options(
    parser: argparse.ArgumentParser,
    *,
    arm: str,
    auto: bool = False,
    trials: bool = True,
    on: str = "",
    throughput: bool = False,
) -> None:
    """Add the options of every verb that boots servers.

    arm: the help of `--arm`. auto: accept `--trials auto`. trials: have that option; without it
    each run is one boot. on: end of the help of `--on`; empty if the verb has none. throughput:
    measure it by default, with an option to leave it out.
    """
    group = parser.add_argument_group("boots and results")
    group.add_argument("--arm", action="append", metavar="A", help=arm)
    if trials:
        group.add_argument(
            "--trials",
            type=_trials_or_auto if auto else _trials,
            default=1,
            metavar="N|auto" if auto else "N",
            help=f"boots of each arm, at most {MOST_TRIALS} (default: 1)"
            + ("; auto: as many as decide its claim" if auto else ""),
        )
    else:
        parser.set_defaults(trials=1)
    if on:
        group.add_argument(
            "--on",
            metavar="CLUSTER",
            help=(
                "run on a Ray cluster: local (this machine), auto (the cluster of this machine) or"
                " HOST:PORT of a head node; "
            )
            + on,
        )
    group.add_argument(
        "--out", type=Path, metavar="DIR", help="where runs are written (default: reports)"
    )
    group.add_argument(
        "--seed", type=int, default=1, metavar="N", help="seed of the prompts (default: 1)"
    )
    default = TimeLimits()
    group.add_argument(
        "--answer-stall",
        type=seconds,
        default=default.answer_stall,
        metavar="S",
        help=(
            "seconds without any progress after which requests in flight are a hang (default:"
            f" {default.answer_stall:g})"
        ),
    )
    if throughput:
        group.add_argument(
            "--throughput",
            action=argparse.BooleanOptionalAction,
            help=(
                "measure the scenario's loads (default: for at most a minute in each arm, on a"
                " server that is started for the run and runs all of vLLM's own parts)."
                " --throughput: without that limit, and on every server"
            ),
        )
    else:
        parser.set_defaults(throughput=False)


def _trials_or_auto(text: str) -> int | None:
    """Return the value of `--trials`: the boots of each arm, None for `auto`."""
    return None if text == "auto" else _trials(text)


def _trials(text: str) -> int:
    """Return the value of `--trials` as a number of boots from 1 to 200."""
    return number(text, least=1, most=MOST_TRIALS, what="number of boots")


def job_from(
    arguments: argparse.Namespace,
    *,
    name: str,
    scenario: Scenario,
    options: ServerOptions,
    choice: ServerChoice,
    arms: Sequence[Arm],
    expect: Expect = Expect.DECLARED,
    compared: bool = False,
) -> Job:
    """Return the job, a run to do, that a command line with `add_run_options` describes.

    With `--on`, connect to the cluster.

    name: the scenario as typed. compared: add an arm for each patch; without `--arm`, only to the
    arms of `Scenario.leading`. Raises `UsageError` for an option that the server does not use, and
    `InfraError` if the cluster does not answer.
    """
    refuse_unused_options(options, choice.kind)
    elsewhere = _connect_cluster(getattr(arguments, "on", None), options, choice)
    if compared:
        arms = with_patches(scenario, arms if arguments.arm else scenario.leading, options.patch)
    return Job(
        name=name,
        scenario=scenario,
        options=options,
        choice=choice,
        arms=arms,
        named_arms=arguments.arm or (),
        trials=arguments.trials,
        seed=arguments.seed,
        out=arguments.out or default_out(),
        limits=TimeLimits(answer_stall=arguments.answer_stall),
        measure=MeasureOptions(arguments.throughput, getattr(arguments, "outputs", False)),
        expect=expect,
        compared=compared,
        folders=[str(folder.absolute()) for folder in named_folders()],
        elsewhere=elsewhere,
    )


def _connect_cluster(
    on: str | None, options: ServerOptions, choice: ServerChoice
) -> Elsewhere | None:
    """Connect to the cluster that `--on` names, and return it; None without `--on`.

    Raises `UsageError` for a server that only this machine can choose or reach, or if no installed
    feature has clusters; and `InfraError` if the cluster does not answer.
    """
    if on is None:
        return None
    started = ", ".join(kinds(lambda facts: facts.started))
    if not choice.kind.facts.started:
        raise UsageError(
            "--on starts servers, and --url names one that runs",
            hint=f"--server with one of {started}",
        )
    if options.server == "auto" and on != "local":
        raise UsageError(
            "--server auto looks at this machine, and --on runs on others",
            hint=f"--server with one of {started}",
        )
    clusters = additions("clusters")
    if not clusters:
        raise UsageError(
            "--on needs a package that runs jobs on a cluster",
            hint="install vllm-repro with all of its packages",
        )
    elsewhere: Elsewhere = load("clusters", next(iter(clusters)))(on)
    return elsewhere


def resumed(
    arguments: argparse.Namespace,
    unfinished: Unfinished,
    *,
    beside: Collection[str] = (),
) -> argparse.Namespace:
    """Return the arguments of an interrupted command, but with this call's `--json` and `--on`.

    Further runs go where the interrupted command wrote its own. The folders of its `--scenarios`
    are added to the catalogue.

    arguments: of this call, with `--resume`. unfinished: the interrupted command. beside: more
    options allowed beside `--resume`. Raises `UsageError` for any other option, for another
    scenario, and if a relative path of the interrupted command does not exist here.
    """
    parser: argparse.ArgumentParser = arguments.parser
    resume, named = ["--resume", str(arguments.resume)], _scenarios(arguments)
    command = [*parser.prog.split(), *resume]
    alone = vars(parser.parse_args([*named, *resume]))  # as if no other option were given
    allowed = {"json", "verb", "scenario_folders", "on", *beside}
    changed = [
        name
        for name, value in alone.items()
        if name not in allowed and value != getattr(arguments, name)
    ]
    if changed:
        raise UsageError(
            "--resume continues with the options of the first call, and"
            f" --{changed[0].replace('_', '-')} would change them",
            hint=shlex.join(command),
        )
    for word in unfinished.words:
        if word.startswith("./") and not Path(word).exists():
            raise UsageError(
                f"there is no {word} here: the {unfinished.what} names it relative to the folder"
                " where it began",
                hint="repeat --resume in that folder",
            )
    begun = parser.parse_args(list(unfinished.words[1:]))  # the first word is the verb
    use_scenario_folders(begun)
    if named and [find(name).id for name in named] != [find(name).id for name in _scenarios(begun)]:
        raise UsageError(
            f"{unfinished.folder} belongs to {_scenarios(begun)[0]}", hint=shlex.join(command)
        )
    begun.json, begun.out = arguments.json, unfinished.out
    if "on" in arguments:
        begun.on = arguments.on
    return begun


def _scenarios(arguments: argparse.Namespace) -> list[str]:
    """Return the scenarios that a command line names, as typed."""
    names = arguments.scenarios if "scenarios" in arguments else [arguments.scenario]
    return [name for name in names if name]
