"""Checks that the parts of a scenario fit together.

The reader checks each word of a file. The checks here compare its parts: an arm that dies needs a signature, a baseline must be an arm,
flags must be known to vLLM. Every mistake is reported with its line.
"""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.environment import variable_mistakes
from vllm_repro.command.flags import flag_mistakes
from vllm_repro.errors import CommandError, ScenarioError
from vllm_repro.scenario.scenario import Arm, Dummy, Scenario
from vllm_repro.scenario.sizes import Size, resolve
from vllm_repro.scenario.workload import Rest, requests_of
from vllm_repro.trigger.trigger import carries
from vllm_repro.verdict.verdict import Expected, Standing
from vllm_repro_lab.parts import MECHANISMS

__all__ = ["Problem", "Reading", "check_meaning", "did_you_mean"]


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake. `line` counts from 1."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


@dataclass
class Reading:
    """Problems and line numbers of one file.

    lines: line of each argument of `Scenario(...)`. arm_lines: line of each arm, by `id()`. made_up: missing or wrong arguments that
    have a placeholder, so that the others can be checked. incomplete: arguments from which a wrong part was dropped.
    """

    file: str
    problems: list[Problem] = field(default_factory=list)
    lines: dict[str, int] = field(default_factory=dict)
    scenario_line: int = 1
    arm_lines: dict[int, int] = field(default_factory=dict)
    made_up: set[str] = field(default_factory=set)
    incomplete: set[str] = field(default_factory=set)

    def problem(self, line: int, text: str) -> None:
        self.problems.append(Problem(self.file, line, text))

    def at(self, key: str) -> int:
        return self.lines.get(key, self.scenario_line)

    def wrong(self, key: str, text: str, *with_keys: str) -> None:
        """Report a problem of an argument, unless it or an argument compared with it has a placeholder."""
        if not self.made_up & {key, *with_keys}:
            self.problem(self.at(key), text)

    def missing(self, key: str, text: str) -> None:
        """Report that something is not in an argument, unless part of the argument was dropped."""
        if key not in self.incomplete:
            self.wrong(key, text)

    def at_arm(self, arm: Arm) -> int:
        return self.arm_lines.get(id(arm), self.at("arms"))


def check_meaning(reading: Reading, path: Path, scenario: Scenario) -> None:
    """Check that the parts of a scenario fit together, except for placeholders."""
    at, wrong = reading.at, reading.wrong
    if scenario.id != path.stem.replace("_", "-"):
        wrong("id", f"id {scenario.id!r} does not match the file's name {path.name!r}: rename one of them")
    if not scenario.title.strip():
        wrong("title", "the title is empty: write the title of the issue")
    for key, issues in (("issue", (scenario.issue,)), ("related", tuple(scenario.related))):
        for issue in issues:
            if not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", issue):
                wrong(key, f"{issue!r} is not an upstream issue: write it like 'vllm-project/vllm#41726'")
    _check_releases(scenario, wrong)
    for version in sorted(scenario.status.contradictions()):
        wrong("status", f"{version} is both bad and good: change one of the ranges")
    if scenario.signature is None and any(arm.expected is Expected.DIES for arm in scenario.arms):
        wrong("arms", "an arm `dies`, but signature= is missing: add the exception, message, frames and phase")
    if scenario.signature is not None and not scenario.signature.frames:
        text = "a signature without frames matches too much: add the functions of the traceback, in order"
        reading.missing("signature", text)
    if not list(requests_of(tuple(scenario.workload))):
        reading.missing("workload", "the workload has no request: add a chat(…) or completion(…)")
    _check_triggers(scenario, reading)
    try:
        command = scenario.reported()
    except CommandError as error:
        if "command" not in reading.made_up:
            reading.problem(at("command") + error.line - 1, f"command: {error}")
        return
    for mistake in (*variable_mistakes(command.env), *flag_mistakes(command.flags)):
        reading.problem(at("command"), f"command: {mistake}")
    if not scenario.arms:
        reading.missing("arms", "there are no arms: add at least `arm('reported', dies)`")
        return
    first = scenario.arms[0]
    if "arms" not in reading.made_up | reading.incomplete:
        if first.edits or not first.expected.has_bug:
            reading.problem(
                reading.at_arm(first),
                "the first arm must be the reported command: without edits, and with `dies`, `errs`, `hangs` or `spins`",
            )
        if first.name != "reported":
            reading.problem(reading.at_arm(first), f"the first arm is named {first.name!r}: rename it to 'reported'")
    if reading.made_up & {"command", "arms"}:
        return  # arms edit the command: both must be real
    _check_baselines(scenario, reading)
    if scenario.lab is not None:
        if scenario.lab.mechanism not in MECHANISMS:
            near = did_you_mean(scenario.lab.mechanism, MECHANISMS)
            wrong("lab", f"the lab has no mechanism {scenario.lab.mechanism!r}{near}")
        _check_tiny_model(reading, at("lab"), "lab", scenario, scenario.lab, scenario.command_in_lab)
    if scenario.dummy is not None:
        _check_tiny_model(reading, at("dummy"), "dummy", scenario, scenario.dummy, scenario.command_with_dummy)
    for change in scenario.causes.changes if scenario.causes else ():
        # A missing reported arm has been reported above.
        if change.arm != "reported" and scenario.arm(change.arm) is None and "arms" not in reading.incomplete:
            near = did_you_mean(change.arm, [arm.name for arm in scenario.arms])
            wrong("causes", f"cause {change.name!r}: there is no arm {change.arm!r}{near}")
        if not change.patches:
            wrong("causes", f"cause {change.name!r} changes nothing: add patched(…)")
    seen: set[str] = set()
    for arm in scenario.arms:
        _check_arm(reading, reading.at_arm(arm), scenario, arm, seen)


def _no_release(text: str) -> str:
    """Return the problem of a release number, or an empty string."""
    try:
        plain = str(Version(text))
    except InvalidVersion:
        return f"{text!r} is not a release number: write it like '0.23.0'"
    # Image tags and package pins use the text as it is.
    return "" if text == plain else f"{text!r}: write it as {plain!r}" + (", without the v" if text[:1] == "v" else "")


def _check_releases(scenario: Scenario, wrong: Callable[..., None]) -> None:
    if problem := _no_release(scenario.try_with):
        wrong("try_with", f"try_with {problem}")
    elif scenario.status.standing(scenario.try_with) is not Standing.BAD:
        text = f"try_with {scenario.try_with!r} is not among the bad releases ({scenario.status.bad}): name one of them"
        wrong("try_with", text, "status")
    if scenario.lab is not None and scenario.lab.vllm and (problem := _no_release(scenario.lab.vllm)):
        wrong("lab", f"lab: vllm {problem}")
    for change in scenario.causes.changes if scenario.causes else ():
        if problem := _no_release(change.release):
            wrong("causes", f"cause {change.name!r}: release {problem}")


def _check_baselines(scenario: Scenario, reading: Reading) -> None:
    """Check that each baseline is an arm with a server of its own."""
    wrong = reading.wrong
    baselines = {load.baseline for load in scenario.loads}
    if len(baselines) > 1:
        wrong("throughput", f"all loads need the same baseline, not {' and '.join(sorted(baselines))}")
    named = [("throughput", name) for name in sorted(baselines)]
    if scenario.output is not None and scenario.output.baseline:
        named.append(("output", scenario.output.baseline))
    for key, name in named:
        arm = scenario.arm(name)
        if arm is None and "arms" in reading.incomplete:
            continue
        if arm is None:
            wrong(key, f"the baseline {name!r} is not an arm{did_you_mean(name, [arm.name for arm in scenario.arms])}")
            continue
        with contextlib.suppress(CommandError):  # reported by _check_arm
            if not scenario.has_own_server(arm):
                wrong(key, f"the baseline {name!r} has the same server as an earlier arm: name that arm")
    points = [point for load in scenario.loads for point in load.points]
    for point in sorted({point for point in points if points.count(point) > 1}):
        wrong("throughput", f"{point} is given twice: remove one")


def _check_triggers(scenario: Scenario, reading: Reading) -> None:
    """Check that some arm of each trigger sends the body fields that the trigger needs."""
    if {"workload", "trigger", "arms"} & (reading.made_up | reading.incomplete) or not scenario.arms:
        return
    own = [  # a near miss may omit the field that another arm sends
        (
            reading.at_arm(arm),
            f"arm {arm.name!r}: ",
            arm.trigger,
            scenario.arms if arm.expected is Expected.UNTRIGGERED else [arm],
        )
        for arm in scenario.arms
        if arm.trigger is not None
    ]
    others = [arm for arm in scenario.arms if arm.trigger is None] or list(scenario.arms)
    for line, whose, trigger, arms in ((reading.at("trigger"), "", scenario.trigger, others), *own):
        requests = [request for arm in arms for request in requests_of(scenario.workload_of(arm))]
        known = {name for request in requests for name in request.fields}
        for wanted in trigger.wanted:
            if any(carries(request.fields, wanted) for request in requests):
                continue
            unsent = [name for name in wanted if name not in known]
            what = repr(unsent[0]) if unsent else f"{' and '.join(wanted)} together"
            if any(carries(request.fields, dict.fromkeys(wanted)) for request in requests):
                what = f"{' and '.join(wanted)} with these values"
            near = did_you_mean(unsent[0], sorted(known)) if unsent else ""
            text = f"{whose}no request has {what}, so sent_with({', '.join(wanted)}) can never be met{near}"
            reading.problem(line, text)


def _too_long(scenario: Scenario, arm: Arm, command: ServeCommand, *, in_lab: bool = False) -> list[str]:
    """Return a message for each request whose prompt and answer exceed `--max-model-len`.

    Raises `CommandError` or `ScenarioError` if a size cannot be resolved.
    """
    if command.get("--max-model-len") in (None, "auto", "-1"):
        return []
    longest, found = command.number("--max-model-len") or 0, []
    for request in requests_of(scenario.workload_of(arm)):
        if "truncate_prompt_tokens" in request.fields:
            continue
        # Only the server can count the tokens of a text: at least one.
        prompt = 1 if isinstance(request.prompt, str) else resolve(request.prompt, command, in_lab=in_lab)
        answer = resolve(request.max_tokens, command, in_lab=in_lab)
        if prompt + answer > longest:
            found.append(f"{request} and an answer of {answer} tokens exceed --max-model-len {longest}")
    return found


def _check_tiny_model(
    reading: Reading, line: int, key: str, scenario: Scenario, dummy: Dummy, command_of: Callable[[Arm], ServeCommand]
) -> None:
    for change in dummy.changes:
        if not change.why:
            reading.problem(line, f"{key}: `{change}` has no why=: add the reason for the report")
    try:
        dummy.shape(scenario.model)
    except ValueError as error:
        reading.missing(key, f"{key}: {error}")
    reported = set(flag_mistakes(scenario.reported().flags))
    for index, arm in enumerate(scenario.arms):
        with contextlib.suppress(CommandError):  # reported by _check_arm
            reported |= set(flag_mistakes(scenario.command_of(arm).flags))
        with contextlib.suppress(CommandError, ScenarioError):  # reported by _check_arm
            reported |= set(_too_long(scenario, arm, scenario.command_of(arm)))
        try:
            command = command_of(arm)
        except CommandError as error:
            reading.problem(line, f"{key}, arm {arm.name!r}: {error}")
            continue
        for mistake in flag_mistakes(command.flags):
            if mistake not in reported:  # the first arm has no edits, so one of the changes is wrong
                reading.problem(reading.at_arm(arm) if index else line, f"{key}, arm {arm.name!r}: {mistake}")
                reported.add(mistake)
        with contextlib.suppress(CommandError, ScenarioError):  # reported by _check_arm
            for refused in _too_long(scenario, arm, command, in_lab=key == "lab"):
                if refused not in reported:
                    reading.problem(line, f"{key}, arm {arm.name!r}: {refused}")
                    reported.add(refused)


def _check_arm(reading: Reading, line: int, scenario: Scenario, arm: Arm, seen: set[str]) -> None:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", arm.name):
        reading.problem(line, f"arm name {arm.name!r} must be lower-case words joined by hyphens")
    if arm.name in seen:
        reading.problem(line, f"two arms are named {arm.name!r}: rename one")
    seen.add(arm.name)
    if arm.bad and not arm.expected.has_bug:
        reading.problem(
            line, f"arm {arm.name!r}: bad= is only for an arm that `dies`, `errs`, `hangs` or `spins`: remove it"
        )
    has_rest = any(isinstance(step, Rest) for step in scenario.workload_of(arm))
    if arm.expected is Expected.SPINS and not has_rest and not {"workload", "arms"} & reading.incomplete:
        reading.problem(
            line, f"arm {arm.name!r} spins, but its workload has no rest(…): add rest(within=30) at its end"
        )
    for version in sorted(scenario.status_of(arm).contradictions() if arm.bad else ()):
        reading.problem(line, f"arm {arm.name!r}: {version} is both bad and good: change one of the ranges")
    try:
        command = scenario.command_of(arm)
        reported = flag_mistakes(scenario.reported().flags)
        for mistake in flag_mistakes(command.flags):
            if mistake not in reported:
                reading.problem(line, f"arm {arm.name!r}: {mistake}")
        for request in requests_of(scenario.workload_of(arm)):
            if isinstance(request.prompt, int | Size) and resolve(request.prompt, command) < 1:
                reading.problem(line, f"arm {arm.name!r}: {request} has no tokens: at least 1 is needed")
        for refused in _too_long(scenario, arm, command):
            if refused not in seen:
                shared = arm.workload is None and not arm.edits
                reading.problem(reading.at("workload") if shared else line, f"arm {arm.name!r}: {refused}")
                seen.add(refused)
    except (CommandError, ScenarioError) as error:
        if str(error) not in seen:  # report a mistake in the shared workload once
            reading.problem(line, f"arm {arm.name!r}: {error}")
            seen.add(str(error))
