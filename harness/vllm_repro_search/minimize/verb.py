"""`vllm-repro minimize`: the smallest part of the reported command that crashes."""

from __future__ import annotations

import argparse
import shlex
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, ClassVar, Literal

from msgspec import structs

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.flags import positive
from vllm_repro.errors import UsageError
from vllm_repro.report.model import RunReport
from vllm_repro.running.job import Job
from vllm_repro.scenario.scenario import Arm, Edit, Scenario
from vllm_repro.scenario.workload import Conversation, Request, Size, Step, Together, resolve
from vllm_repro.secret_names import is_secret_name
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions, edited_command
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected
from vllm_repro_search.boot_search import (
    ArmSearch,
    add_search,
    common_fields,
    job_of_one_arm,
    run_search,
    with_resumed,
)
from vllm_repro_search.minimize.plan import Attempt, MinimizationPlan
from vllm_repro_search.plan import SearchState
from vllm_repro_search.record import ArmBoot, ReleaseSearchRecord

_EPILOG = """

exit status:
  0  the answer is known: if one of the parts that are left is left out, this
     crash does not occur
  1  a surprise: the reported command does not crash
  2  undecided: a limit was reached, or vLLM refuses the reported command
  64 wrong usage, 70 a fault of the harness itself, 130 interrupted

The first boot is the whole command. The following ones leave out requests, flags or environment
variables, many at a time and then one by one. What vLLM refuses to start without is kept.
minimize.json and minimize.md in OUT/SCENARIO/minimize/ are rewritten after each boot; --resume
continues them. vllm_repro_search/docs/smaller.md"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm-repro minimize`."""
    add_search(
        parser,
        example="vllm-repro minimize tq-mtp-cudagraphs --server lab",
        prints="the content of minimize.json",
        more=_EPILOG,
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `vllm-repro minimize`: reduce the command by boots; return the exit status."""
    arguments, unfinished = with_resumed(arguments, Minimization)
    job = job_of_one_arm(arguments, "minimize")
    parts = reducible(job.scenario, job.arms[0], job.choice.kind, job.options)
    record = Minimization(
        **common_fields(job, job.reproduce),
        arm=job.arms[0].name,
        units=parts.units,
        untried=parts.untried,
        rest=parts.rest,
    )
    return run_search(arguments, MinimizationSearch(job, record, parts), unfinished)


@dataclass(frozen=True)
class Unit:
    """A part of the command or workload that may be removed."""

    kind: Literal["request", "pause", "flag", "variable"]
    # of a flag or variable
    name: str
    # as on the command line, or in words without a name
    text: str
    # the same as the servers got it, if the lab's value differs
    booted: str = ""


class MinimizationBoot(ArmBoot, frozen=True, kw_only=True):
    """One boot of a reduced command, and its outcome."""

    # see `Attempt`
    units: tuple[int, ...]
    unused: tuple[int, ...]
    # of a crash
    phase: str | None

    @property
    def tested(self) -> bool:
        """Return False if the host or a cancellation spoiled the boot."""
        return self.outcome not in (Outcome.INFRA, Outcome.CANCELLED)

    @property
    def attempt(self) -> Attempt:
        """Return the boot as the plan counts it."""
        refused = self.outcome in (Outcome.BOOT_FAILED, Outcome.UNSUPPORTED)
        return Attempt(self.units, self.outcome is Outcome.CRASH, refused, self.unused)

    @property
    def text(self) -> str:
        """Return the outcome and its reason, as a phrase."""
        return f"{'vLLM does not start' if self.attempt.refused else self.outcome}: {self.why}"


class Minimization(ReleaseSearchRecord, frozen=True, kw_only=True):
    """Record of a reduction of a command and its workload: its units and its boots."""

    verb: ClassVar[str] = "minimize"
    file: ClassVar[str] = "minimize"
    fixed: ClassVar[tuple[str, ...]] = ("units", "untried")

    # requests and pauses first
    units: tuple[Unit, ...]
    # flags and variables of the report that this kind of server sets or removes itself
    untried: tuple[str, ...]
    # the reported command without its units
    rest: str
    boots: tuple[MinimizationBoot, ...] = ()

    @property
    def plan(self) -> MinimizationPlan:
        """Return the plan after the boots that count."""
        requests = sum(not unit.name for unit in self.units)
        attempts = tuple(boot.attempt for boot in self.kept())
        return MinimizationPlan(
            requests=requests, others=len(self.units) - requests, attempts=attempts
        )

    @property
    def exit_status(self) -> int:
        """Return 0 for an answer, 1 if the reported command does not crash, 2 if undecided."""
        return {SearchState.FOUND: 0, SearchState.QUIET: 1}.get(self.plan.state, 2)

    @property
    def smallest(self) -> list[Unit]:
        """Return the units of the smallest crashing set by now; empty without a crash."""
        return [self.units[unit] for unit in self.plan.kept or ()]

    @property
    def smallest_command(self) -> str:
        """Return the reported command with what is left, for a POSIX shell."""
        variables = [unit.text for unit in self.smallest if unit.kind == "variable"]
        flags = [f"  {unit.text}" for unit in self.smallest if unit.kind == "flag"]
        return " \\\n".join([*variables, self.rest, *flags])

    @property
    def command(self) -> str:
        """Return the smallest crashing command by now; empty without a crash."""
        return "" if self.plan.kept is None else self.smallest_command

    def answered(self) -> list[bool]:
        """Return for each boot whether it gave an answer."""
        return [boot.tested for boot in self.boots]

    def removals(self) -> list[tuple[str, MinimizationBoot]]:
        """Return the text of each unit that is left, and the boot without it, if there was one."""
        kept = self.plan.kept or ()
        smaller = {
            tuple(remaining for remaining in kept if remaining != unit): unit for unit in kept
        }
        boots = [boot for boot in self.kept() if boot.units in smaller]
        return [(self.units[smaller[boot.units]].text, boot) for boot in boots]

    def without(self, units: Sequence[int], boots: Sequence[MinimizationBoot]) -> str:
        """Return the texts of what a boot with `units` leaves out of the smallest crashing set.

        boots: those before it, whose smallest crashing set counts. Empty for the first boot.
        """
        left = structs.replace(self, boots=tuple(boots)).plan.kept or ()
        return "; ".join(self.units[unit].text for unit in left if unit not in units)

    def derived(self) -> dict[str, Any]:
        """Return what minimize.json has beside the fields, such as the answer."""
        state = self.plan.state
        return {
            "state": state,
            "answer": [unit.text for unit in self.smallest] if state is SearchState.FOUND else None,
            "command": self.smallest_command,
            "removals": {text: boot.text for text, boot in self.removals()},
        }

    def counts(self) -> list[tuple[str, int, int]]:
        """Return (kind, units left, units of the whole) for each kind of unit; requests last."""
        kinds = dict.fromkeys(
            unit.kind for unit in sorted(self.units, key=lambda unit: not unit.name)
        )
        left = Counter(unit.kind for unit in self.smallest)
        whole = Counter(unit.kind for unit in self.units)
        return [(kind, left[kind], whole[kind]) for kind in kinds]


_OURS = frozenset({"--model", "--host", "--port", "--load-format"})
"""Flags that the harness sets for every server."""


@dataclass(frozen=True, kw_only=True)
class Reducible:
    """Parts of `arm` that may be removed. units, untried, rest: see `Minimization`."""

    arm: Arm
    # its workload
    steps: tuple[Step, ...]
    # requests, pauses and rests of the steps, each with the number of its step: the first units
    pieces: tuple[tuple[int, Step], ...]
    units: tuple[Unit, ...]
    untried: tuple[str, ...]
    rest: str

    def with_units(self, kept: Sequence[int]) -> Arm:
        """Return the arm with the units `kept`, and all that is no unit."""
        removed = {
            unit.name: unit.text
            for number, unit in enumerate(self.units)
            if unit.name and number not in kept
        }
        edit = Edit(
            f"without {', '.join(removed.values())}", lambda command: _less(command, removed)
        )
        workload = tuple(
            self._steps([self.pieces[unit] for unit in kept if unit < len(self.pieces)])
        )
        return replace(
            self.arm, edits=(*self.arm.edits, *([edit] if removed else [])), workload=workload
        )

    def _steps(self, pieces: Sequence[tuple[int, Step]]) -> Iterator[Step]:
        """Yield the steps of the workload with only these pieces of them."""
        for number, group in groupby(pieces, lambda pair: pair[0]):
            left = [piece for _, piece in group]
            requests = tuple(piece for piece in left if isinstance(piece, Request))
            if isinstance(self.steps[number], Conversation):
                yield Conversation(requests)
            else:
                yield Together(requests) if len(left) > 1 else left[0]

    def unsent(self, kept: Sequence[int], sent: int) -> tuple[int, ...]:
        """Return the workload's units in `kept` from the first unsent request on.

        Empty if all were sent. sent: number of requests that were sent.
        """
        left = [unit for unit in kept if unit < len(self.pieces)]
        requests = [
            place for place, unit in enumerate(left) if isinstance(self.pieces[unit][1], Request)
        ]
        return tuple(left[requests[sent] :]) if sent < len(requests) else ()


def reducible(scenario: Scenario, arm: Arm, kind: ServerKind, options: ServerOptions) -> Reducible:
    """Return what may be removed from `arm` on servers of `kind`.

    Raises `UsageError` for an arm that is not declared to crash, or that patches vLLM.
    """
    if arm.expected is not Expected.DIES or scenario.signature is None:
        raise UsageError(
            f"the arm {arm.name} of {scenario.id} is not declared to crash with a signature",
            hint=f"vllm-repro run {scenario.id} --arm {arm.name} shows what this arm does",
        )
    if arm.patches:
        raise UsageError(
            f"the arm {arm.name} changes vLLM's source, so a smaller command would not crash"
            " without that change",
            hint="--arm with one of "
            + ", ".join(candidate.name for candidate in scenario.arms if not candidate.patches),
        )
    command, _, changes = edited_command(scenario, arm, kind, options)
    reported = changed = scenario.reported()
    for edit in changes:
        changed = edit.apply(changed)
    fixed = _OURS | {positive(flag.name) for flag in changed.flags if flag not in reported.flags}
    booted, declared = _by_name(command), _by_name(scenario.command_of(arm))
    # An edit may have a value for the lab. The reader pastes the declared one.
    flags = {name: declared.get(name, text) for name, text in booted.items() if name not in fixed}
    lab_values = {name: booted[name] for name, text in flags.items() if booted[name] != text}
    env = dict(command.env)
    if command.container is not None and kind.facts.container:
        env = dict(command.container.env) | env
    variables = {
        name: f"{name}={shlex.quote(value)}"
        for name, value in env.items()
        if not is_secret_name(name)
    }
    steps = scenario.workload_of(arm)
    pieces = tuple(
        (number, _sized(piece, command))
        for number, step in enumerate(steps)
        for piece in _pieces(step)
    )
    removable = {**flags, **variables}
    rest = _less(scenario.command_of(arm), removable)
    left = [positive(flag.name) for flag in rest.flags] + [
        name for name, _ in (*(rest.container.env if rest.container else ()), *rest.env)
    ]
    return Reducible(
        arm=arm,
        steps=steps,
        pieces=pieces,
        units=(
            *(
                Unit("request" if isinstance(piece, Request) else "pause", "", f"{piece}")
                for _, piece in pieces
            ),
            *(Unit("flag", name, text, lab_values.get(name, "")) for name, text in flags.items()),
            *(Unit("variable", *pair) for pair in variables.items()),
        ),
        untried=tuple(name for name in dict.fromkeys(left) if name not in _OURS),
        rest=rest.render(),
    )


def _by_name(command: ServeCommand) -> dict[str, str]:
    """Return the flags of a command by name, as on a command line.

    One that is given several times has one text.
    """
    texts: dict[str, str] = {}
    for flag in command.flags:
        name = positive(flag.name)
        texts[name] = f"{texts.get(name, '')} {shlex.join((flag.name, *flag.values))}".lstrip()
    return texts


def _pieces(step: Step) -> tuple[Step, ...]:
    """Return the requests of a group or conversation; any other step as it is."""
    if isinstance(step, Together):
        return step.requests
    return step.turns if isinstance(step, Conversation) else (step,)


def _sized(piece: Step, command: ServeCommand) -> Step:
    """Return a request with its formulas resolved by `command`; any other step as it is.

    So its sizes stay the same when a flag is removed.
    """
    if not isinstance(piece, Request):
        return piece

    def number(size: Any) -> Any:
        return resolve(size, command) if isinstance(size, Size) and size.lab is None else size

    sizes = {name: number(getattr(piece, name)) for name in ("prompt", "shared", "max_tokens")}
    return replace(piece, **sizes)


def _less(command: ServeCommand, removed: Collection[str]) -> ServeCommand:
    """Return `command` without these flags and variables."""
    container = command.container
    return replace(
        command,
        flags=tuple(flag for flag in command.flags if positive(flag.name) not in removed),
        env=tuple(pair for pair in command.env if pair[0] not in removed),
        container=container
        and replace(container, env=tuple(p for p in container.env if p[0] not in removed)),
    )


class MinimizationSearch(ArmSearch[Minimization, tuple[int, ...]]):
    """Search of the smallest part of a command and workload that crashes."""

    def __init__(self, job: Job, record: Minimization, parts: Reducible) -> None:
        super().__init__(job, record)
        self._parts = parts
        # These are printed, too.
        hidden = self.redactor.command
        units = tuple(
            replace(unit, text=hidden(unit.text), booted=hidden(unit.booted))
            for unit in record.units
        )
        self.record = structs.replace(self.record, units=units, rest=hidden(record.rest))

    def describe(self, item: tuple[int, ...], number: int) -> str:
        """Return the progress line of a boot, which names what it leaves out."""
        removed = self.record.without(item, self.record.boots)
        return f"boot {number}: {f'without {removed}' if removed else 'the whole command'}"

    def changed_arm(self, item: tuple[int, ...]) -> Arm:
        """Return the arm with these units only."""
        return self._parts.with_units(item)

    def boot_of(
        self, item: tuple[int, ...], report: RunReport, common: Mapping[str, Any]
    ) -> MinimizationBoot:
        """Return the boot of the command with these units."""
        trial = report.arms[0].trials[-1]
        crashed = trial.outcome is Outcome.CRASH
        unused = self._parts.unsent(item, trial.requests["sent"]) if crashed else ()
        return MinimizationBoot(units=item, unused=unused, phase=trial.phase, **common)
