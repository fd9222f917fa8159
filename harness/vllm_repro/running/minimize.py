"""Reduction of a reported command and its workload: a run for each boot, and the record on disk after each."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.flags import positive
from vllm_repro.errors import UsageError
from vllm_repro.report.minimize import Boot, Minimization, Unit, answer, markdown, minimization_dict, without
from vllm_repro.running.job import Job
from vllm_repro.running.resume import UnfinishedMinimization
from vllm_repro.running.search import BootSearch
from vllm_repro.scenario.scenario import Arm, Edit, Scenario
from vllm_repro.scenario.workload import Conversation, Request, Size, Step, Together, resolve
from vllm_repro.secret_names import is_secret_name
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions, edited_command
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Expected

__all__ = ["Reducible", "minimize", "reducible"]

_OURS = frozenset({"--model", "--host", "--port", "--load-format"})
"""Flags that the harness sets for every server."""


@dataclass(frozen=True, kw_only=True)
class Reducible:
    """What may be removed from `arm`.

    pieces: the requests, pauses and rests of the workload, each with the number of its step. names: of the flags and variables after
    them. untried: see `Minimization`.
    """

    arm: Arm
    pieces: tuple[tuple[int, Step], ...]
    names: tuple[str, ...]
    units: tuple[Unit, ...]
    untried: tuple[str, ...]

    def with_units(self, kept: Sequence[int]) -> Arm:
        """Return the arm with the units `kept`, and all that is no unit."""
        first = len(self.pieces)
        removed = {name for unit, name in enumerate(self.names, first) if unit not in kept}
        words = ", ".join(unit.text for number, unit in enumerate(self.units) if number >= first and number not in kept)
        edits = (Edit(f"without {words}", lambda command: _less(command, removed)),) if removed else ()
        workload = tuple(self._steps([self.pieces[unit] for unit in kept if unit < first]))
        return replace(self.arm, edits=(*self.arm.edits, *edits), workload=workload)

    def _steps(self, pieces: Sequence[tuple[int, Step]]) -> Iterator[Step]:
        for number, step in enumerate(self.arm.workload or ()):
            left = [piece for place, piece in pieces if place == number]
            requests = tuple(piece for piece in left if isinstance(piece, Request))
            if isinstance(step, Conversation) and left:
                yield Conversation(requests)
            elif len(left) > 1:
                yield Together(requests)
            else:
                yield from left

    def unsent(self, kept: Sequence[int], sent: int) -> tuple[int, ...]:
        """Return the pieces from the first request on that was not sent, if `sent` requests were."""
        left = [unit for unit in kept if unit < len(self.pieces)]
        before, begun = 0, -1
        for place, unit in enumerate(left):
            number, piece = self.pieces[unit]
            beside = number == begun and isinstance((self.arm.workload or ())[number], Together)
            if isinstance(piece, Request):
                if before >= sent and not beside:
                    return tuple(left[place:])
                before += 1
            begun = number
        return ()


def reducible(scenario: Scenario, arm: Arm, kind: ServerKind, options: ServerOptions) -> Reducible:
    """Return what may be removed from `arm` on servers of `kind`. Raises `UsageError` for an arm that does not crash."""
    if arm.expected is not Expected.DIES or scenario.signature is None:
        raise UsageError(
            f"the arm {arm.name} of {scenario.id} is not declared to crash with a signature",
            hint=f"vllm-repro run {scenario.id} --arm {arm.name} shows what this arm does",
        )
    command, _, changes = edited_command(scenario, arm, kind, options)
    changed = scenario.reported()
    for edit in changes:
        changed = edit.apply(changed)
    needed = _OURS | {positive(flag.name) for flag in changed.flags if flag not in scenario.reported().flags}
    flags: dict[str, str] = {}
    for flag in command.flags:
        name = positive(flag.name)
        if name not in needed:
            words = shlex.join((flag.name, *flag.values))
            flags[name] = f"{flags[name]} {words}" if name in flags else words
    container = command.container if kind.facts.container else None
    env = {**dict(container.env if container else ()), **dict(command.env)}
    variables = {name: f"{name}={value}" for name, value in env.items() if not is_secret_name(name)}
    steps = [_sized(step, command) for step in scenario.workload_of(arm)]
    pieces = tuple((number, piece) for number, step in enumerate(steps) for piece in _pieces(step))
    reported = scenario.command_of(arm)
    names = [positive(flag.name) for flag in reported.flags]
    names += [name for name, _ in (*(reported.container.env if reported.container else ()), *reported.env)]
    return Reducible(
        arm=replace(arm, workload=tuple(steps)),
        pieces=pieces,
        names=(*flags, *variables),
        units=(
            *(Unit("request", str(piece)) for _, piece in pieces),
            *(Unit("flag", text) for text in flags.values()),
            *(Unit("variable", text) for text in variables.values()),
        ),
        untried=tuple(
            name for name in dict.fromkeys(names) if name not in {*flags, *variables, "--model", "--host", "--port"}
        ),
    )


def _pieces(step: Step) -> tuple[Step, ...]:
    if isinstance(step, Together):
        return step.requests
    return step.turns if isinstance(step, Conversation) else (step,)


def _sized(step: Step, command: ServeCommand) -> Step:
    """Return `step` with the sizes that `command` gives it, so that it stays the same without a flag."""

    def number(size: Any) -> Any:
        return resolve(size, command) if isinstance(size, Size) and size.lab is None else size

    def fixed(request: Request) -> Request:
        prompt, shared = number(request.prompt), number(request.shared)
        return replace(request, prompt=prompt, shared=shared, max_tokens=number(request.max_tokens))

    match step:
        case Request():
            return fixed(step)
        case Together(requests=requests):
            return Together(tuple(map(fixed, requests)))
        case Conversation(turns=turns):
            return Conversation(tuple(map(fixed, turns)))
    return step


def _less(command: ServeCommand, removed: set[str]) -> ServeCommand:
    """Return `command` without these flags and variables."""
    container = command.container
    if container is not None:
        container = replace(container, env=tuple(pair for pair in container.env if pair[0] not in removed))
    return replace(
        command,
        flags=tuple(flag for flag in command.flags if positive(flag.name) not in removed),
        env=tuple(pair for pair in command.env if pair[0] not in removed),
        container=container,
    )


def minimize(
    job: Job,
    plan: Minimization,
    parts: Reducible,
    announce: Callable[[str], None],
    *,
    most_boots: int | None = None,
    most_seconds: float | None = None,
    unfinished: UnfinishedMinimization | None = None,
) -> tuple[Minimization, Path]:
    """Boot until no unit can be removed, and return the record and its folder. Arguments and errors are those of `find_threshold`."""
    search = _Minimize(job, plan, announce, parts)
    if unfinished is not None:
        search.resume(
            unfinished, boots=unfinished.boots(), **{name: unfinished.head[name] for name in ("version", "command")}
        )
    return search.run(most_boots, most_seconds)


class _Minimize(BootSearch[Minimization, Sequence[int]]):
    verb, file = "minimize", "minimize"

    def __init__(self, job: Job, found: Minimization, announce: Callable[[str], None], parts: Reducible) -> None:
        super().__init__(job, found, announce)
        self._parts = parts
        # These are printed, too.
        units = tuple(replace(unit, text=self._redactor.command(unit.text)) for unit in found.units)
        self.found = replace(self.found, units=units)
        self._name_command()

    def _name_command(self) -> None:
        kept = self.found.search.kept
        arm = self._parts.with_units(range(len(self.found.units)) if kept is None else kept)
        command = self._redactor.command(self._job.scenario.command_of(arm).render())
        self.found = replace(self.found, command=command)

    def _next(self) -> Sequence[int] | None:
        return self.found.search.choose()

    def _boots(self) -> int:
        return len(self.found.boots)

    def _json(self) -> Mapping[str, Any]:
        return minimization_dict(self.found)

    def _markdown(self) -> str:
        return markdown(self.found)

    def _answered(self) -> list[bool]:
        return [boot.attempt is not None for boot in self.found.boots]

    def _boot(self, chosen: Sequence[int]) -> str | None:
        began = time.monotonic()
        removed = without(self.found, chosen, self.found.boots)
        self._progress.line(f"boot {self._boots() + 1}: {f'without {removed}' if removed else 'the whole command'}")
        report = self._boot_arm(self._parts.with_units(chosen))
        if report.interrupted:
            return report.interrupted
        trial = report.arms[0].trials[-1]
        crashed = trial.outcome is Outcome.CRASH
        boot = Boot(
            units=tuple(chosen),
            unused=self._parts.unsent(chosen, trial.requests["sent"]) if crashed else (),
            outcome=trial.outcome,
            phase=trial.phase,
            why=trial.why,
            run=report.folder.name,
            duration_s=round(time.monotonic() - began, 1),
        )
        self.found = replace(self.found, boots=(*self.found.boots, boot), version=report.version or self.found.version)
        self._name_command()
        self._progress.line(f"  {answer(self.found)}")
        return None
