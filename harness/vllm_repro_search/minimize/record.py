"""A reduction of a reported command: its record, its answer in sentences, and both as JSON and as text to paste."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from vllm_repro.report.format import plural, seconds
from vllm_repro.report.text import cell, code, fence
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_search.minimize.plan import Attempt, Search, State
from vllm_repro_search.record import SearchRecord, page

__all__ = ["Boot", "Minimization", "Unit", "answer", "markdown", "minimization_dict", "without"]

_ONE_TOKEN = "The request for one token that the harness sends to every server is enough."


@dataclass(frozen=True)
class Unit:
    """A part of the command or workload that may be removed.

    text: as on the command line, or in words without a `name`. booted: the same as the servers got it, if the lab's value differs.
    """

    kind: Literal["request", "pause", "flag", "variable"]
    name: str
    text: str
    booted: str = ""


@dataclass(frozen=True, kw_only=True)
class Boot:
    """One boot. units, unused: see `Attempt`. phase: of a crash. run: name of the run's folder."""

    units: tuple[int, ...]
    unused: tuple[int, ...]
    outcome: Outcome
    phase: str | None
    why: str
    run: str
    duration_s: float

    @property
    def tested(self) -> bool:
        return self.outcome not in (Outcome.INFRA, Outcome.CANCELLED)

    @property
    def attempt(self) -> Attempt:
        refused = self.outcome in (Outcome.BOOT_FAILED, Outcome.UNSUPPORTED)
        return Attempt(self.units, self.outcome is Outcome.CRASH, refused, self.unused)

    @property
    def happened(self) -> str:
        return f"{'vLLM does not start' if self.attempt.refused else self.outcome}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class Minimization(SearchRecord):
    """A reduction.

    units: requests and pauses first. untried: flags and variables of the report that this kind of server sets or removes itself.
    rest: the reported command without its units.
    """

    units: tuple[Unit, ...]
    untried: tuple[str, ...]
    rest: str
    version: str | None = None
    boots: tuple[Boot, ...] = ()

    @property
    def search(self) -> Search:
        """Return the search after all boots."""
        requests = sum(not unit.name for unit in self.units)
        attempts = tuple(boot.attempt for boot in self.boots if boot.tested)
        return Search(requests=requests, others=len(self.units) - requests, attempts=attempts)

    @property
    def exit_status(self) -> int:
        """Return 0 for an answer, 1 if the reported command does not crash, 2 if undecided."""
        return {State.FOUND: 0, State.QUIET: 1, State.OPEN: 2, State.STUCK: 2}[self.search.state]

    @property
    def kept(self) -> list[Unit]:
        """Units of the smallest crashing set by now."""
        return [self.units[unit] for unit in self.search.kept or ()]

    @property
    def command(self) -> str:
        """The reported command with what is left, for a POSIX shell."""
        variables = [unit.text for unit in self.kept if unit.kind == "variable"]
        flags = [f"  {unit.text}" for unit in self.kept if unit.kind == "flag"]
        return " \\\n".join([*variables, self.rest, *flags])

    def removals(self) -> dict[int, Boot]:
        """Return the boot without each unit that is left, if there was one."""
        kept = self.search.kept or ()
        smaller = {tuple(one for one in kept if one != unit): unit for unit in kept}
        return {smaller[boot.units]: boot for boot in self.boots if boot.tested and boot.units in smaller}


def answer(found: Minimization) -> str:
    """Return the answer in a few sentences."""
    search = found.search
    kept = search.kept
    if kept is None:
        first = next((boot.happened for boot in found.boots if boot.tested), "it was not booted, or gave no answer.")
        surprise = search.state is State.QUIET
        return f"{'Surprise: the reported command does not show this crash' if surprise else 'Undecided'}. The whole command: {first}"
    kinds: dict[str, list[bool]] = {}
    for number, unit in sorted(enumerate(found.units), key=lambda pair: not pair[1].name):
        kinds.setdefault(unit.kind, []).append(number in kept)
    counts = " and ".join(f"{sum(left)} of {plural(len(left), kind)}" for kind, left in kinds.items())
    if search.state is State.OPEN:
        return f"It crashes with {counts}. The search is not finished."
    text = f"The crash needs {counts}{': ' if kept else ''}{'; '.join(unit.text for unit in found.kept)}."
    if kept:
        text += f" {'If one of these is left out,' if len(kept) > 1 else 'Without it'} this crash does not occur."
    if not any(kinds.get("request", [True])):
        (*_, phase) = (boot.phase for boot in found.boots if boot.outcome is Outcome.CRASH)
        text += f" {_ONE_TOKEN if phase == 'request' else f'It crashes without any request, in phase {phase}.'}"
    return text


def without(found: Minimization, units: Sequence[int], boots: Sequence[Boot]) -> str:
    """Return what a boot with `units` leaves out of what was left after `boots`; empty for the first one."""
    left = replace(found, boots=tuple(boots)).search.kept or ()
    return "; ".join(found.units[unit].text for unit in left if unit not in units)


def minimization_dict(found: Minimization) -> dict[str, Any]:
    """Return the content of `minimize.json`. `answer` is null unless the search is finished."""
    state = found.search.state
    return {
        "schema": 1,
        **asdict(found),
        "state": state,
        "answer": [unit.text for unit in found.kept] if state is State.FOUND else None,
        "command": found.command,
        "removals": {found.units[unit].text: boot.happened for unit, boot in found.removals().items()},
        "reading": answer(found),
    }


def markdown(found: Minimization) -> str:
    """Return `minimize.md`, which lies in `<scenario>/minimize/<id>/` and links to runs beside it."""
    parts = []
    if found.search.kept is not None:
        parts.append(f"The reported command with what is left of it:\n\n{fence(found.command, 'console')}")
        if found.untried:
            names = ", ".join(code(name) for name in found.untried)
            parts.append(f"Left in, because a {found.server} server handles these itself: {names}.")
        if smaller := [unit for unit in found.kept if unit.booted]:
            values = ", ".join(f"{code(unit.booted)} for {code(unit.text)}" for unit in smaller)
            parts.append(f"The {found.server} servers had smaller values: {values}.")
    if removals := found.removals():
        rows = [
            f"| {code(found.units[unit].text, in_table=True)} | {cell(boot.happened)} | {_link(found, boot)} |"
            for unit, boot in removals.items()
        ]
        parts.append("\n".join(["| without | what happened | run |", "|---|---|---|", *rows]))
    crashes = sum(boot.outcome is Outcome.CRASH for boot in found.boots)
    summary = f"{plural(len(found.boots), 'boot')}, {crashes} of which crashed"
    parts.append(f"<details><summary>{summary}</summary>\n\n{_table(found)}\n\n</details>")
    reading = f"**{cell(answer(found))}**"
    return page(found, "the smallest command that crashes", reading, parts, version=found.version)


def _table(found: Minimization) -> str:
    lines = ["| boot | without also | result | took | run |", "|---|---|---|---|---|"]
    for number, boot in enumerate(found.boots):
        left_out = cell(without(found, boot.units, found.boots[:number])) or "-"
        result = boot.outcome if boot.outcome is Outcome.CRASH else cell(boot.happened)
        took = seconds(boot.duration_s)
        lines.append(f"| {number + 1} | {left_out} | {result} | {took} | {_link(found, boot)} |")
    return "\n".join(lines)


def _link(found: Minimization, boot: Boot) -> str:
    return f"[{boot.run}](../{found.scenario}/{boot.run}/report.md)"
