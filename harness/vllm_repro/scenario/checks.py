"""Checks that the parts of a scenario fit together.

The reader checks each word of a file. The checks here compare its parts: an arm that dies needs a
signature, a baseline must be an arm, flags must be known to vLLM. Each mistake is reported with its
line.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.flags import flag_mistakes
from vllm_repro.errors import CommandError, ScenarioError
from vllm_repro.scenario.scenario import NOT_STATED, Arm, Dummy, Scenario
from vllm_repro.scenario.workload import Request, Rest, Size, requests_of, resolve
from vllm_repro.secret_names import variable_mistakes
from vllm_repro.trigger.trigger import Wanted
from vllm_repro.verdict.verdict import Expected, Standing
from vllm_repro_lab.parts import MECHANISMS


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake in a scenario file. `line` counts from 1."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'max_tokens'?` with the most similar known word; else empty."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


@dataclass
class Reading:
    """A scenario file that is read: its problems so far, and the lines of its parts."""

    file: str
    problems: list[Problem] = field(default_factory=list)
    # Line of each argument of `Scenario(...)`.
    lines: dict[str, int] = field(default_factory=dict)
    # Line of `Scenario(...)`.
    scenario_line: int = 1
    # First line of each argument and key, by name.
    words: dict[str, int] = field(default_factory=dict)
    # Line of each arm, by `id()`.
    arm_lines: dict[int, int] = field(default_factory=dict)

    def problem(self, line: int, text: str) -> None:
        """Add a problem at this line."""
        self.problems.append(Problem(self.file, line, text))

    def line_of(self, argument: str) -> int:
        """Return the line of an argument of `Scenario(...)`, or of the call if it is left out."""
        return self.lines.get(argument, self.scenario_line)

    def wrong(self, key: str, text: str) -> None:
        """Add a problem at the line of an argument of `Scenario(...)`."""
        self.problem(self.line_of(key), text)

    def at_arm(self, arm: Arm) -> int:
        """Return the line of an arm, or of `arms=` if it is not known."""
        return self.arm_lines.get(id(arm), self.line_of("arms"))


def check_meaning(reading: Reading, path: Path, scenario: Scenario) -> None:
    """Add a problem to `reading` for each part of a scenario that does not fit the others.

    Stop early if the command cannot be parsed or there are no arms. path: of the file, whose name
    is compared with the id.
    """
    wrong = reading.wrong
    if scenario.id != path.stem.replace("_", "-"):
        wrong(
            "id",
            f"id {scenario.id!r} does not match the file's name {path.name!r}: rename one of them",
        )
    if not scenario.title.strip():
        wrong("title", "the title is empty: write the title of the issue")
    for key, issues in (("issue", (scenario.issue,)), ("related", tuple(scenario.related))):
        for issue in issues:
            if issue != NOT_STATED and not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", issue):
                wrong(
                    key,
                    f"{issue!r} is not an upstream issue: write it like 'vllm-project/vllm#41726'",
                )
    _check_releases(scenario, wrong)
    if "signature" not in reading.lines and any(
        arm.expected is Expected.DIES for arm in scenario.arms
    ):
        wrong(
            "arms",
            "an arm `dies`, but signature= is missing: add the exception, message, frames and"
            " phase",
        )
    if scenario.signature is not None and not scenario.signature.frames:
        wrong(
            "signature",
            "a signature without frames matches too much: add the functions of the traceback, in"
            " order",
        )
    if not list(requests_of(tuple(scenario.workload))):
        wrong("workload", "the workload has no request: add a chat(…) or completion(…)")
    _check_triggers(scenario, reading)
    try:
        command = scenario.reported()
    except CommandError as error:
        reading.problem(reading.line_of("command") + error.line - 1, f"command: {error}")
        return
    mistakes = flag_mistakes(command.flags)
    for mistake in (*variable_mistakes(command.env), *mistakes):
        reading.problem(reading.line_of("command"), f"command: {mistake}")
    if not scenario.arms:
        wrong("arms", "there are no arms: add at least `arm('reported', dies)`")
        return
    first, line = scenario.arms[0], reading.at_arm(scenario.arms[0])
    if first.edits or not first.expected.has_bug:
        reading.problem(
            line,
            "the first arm must be the reported command: without edits, and with `dies`, `errs`,"
            " `hangs` or `spins`",
        )
    if first.name != "reported":
        reading.problem(line, f"the first arm is named {first.name!r}: rename it to 'reported'")
    _check_baselines(scenario, reading)
    _check_alike(scenario, reading)
    _check_causes(scenario, reading)
    _check_arms(scenario, reading)
    seen = set(mistakes)
    _check_commands(scenario, reading, seen, "", scenario.command_of)
    if scenario.lab is not None:
        if scenario.lab.mechanism not in MECHANISMS:
            wrong(
                "lab",
                f"the lab has no mechanism {scenario.lab.mechanism!r}"
                f"{did_you_mean(scenario.lab.mechanism, MECHANISMS)}",
            )
        elif scenario.lab.capture and MECHANISMS[scenario.lab.mechanism].alone:
            wrong(
                "lab",
                f"the lab's mechanism {scenario.lab.mechanism} has no capture mode: leave"
                " capture= out",
            )
        _check_tiny_model(scenario, reading, "lab", scenario.lab)
        _check_commands(scenario, reading, seen, "lab", scenario.command_in_lab)
    if scenario.dummy is None:
        try:
            _ = scenario.tiny_model
        except ValueError as error:
            wrong("model", f"model: {error}")
    else:
        _check_tiny_model(scenario, reading, "dummy", scenario.dummy)
        _check_commands(scenario, reading, seen, "dummy", scenario.command_with_dummy)


def _no_release(text: str) -> str:
    """Return what is wrong with a release number such as `v0.23`; empty if nothing is."""
    try:
        plain = str(Version(text))
    except InvalidVersion:
        return f"{text!r} is not a release number: write it like '0.23.0'"
    # Image tags and package pins use the text as it is.
    if text != plain:
        return f"{text!r}: write it as {plain!r}" + (", without the v" if text[:1] == "v" else "")
    short = len(Version(text).release) < 3
    return f"{text!r} is no whole release number: write it like '0.28.0'" if short else ""


def _check_releases(scenario: Scenario, wrong: Callable[..., None]) -> None:
    """Report wrong release numbers, a `try_with` without the bug, and contradictory ranges.

    wrong: `Reading.wrong`.
    """
    if problem := _no_release(scenario.try_with):
        wrong("try_with", f"try_with {problem}")
    elif scenario.status.standing(scenario.try_with) is not Standing.BAD:
        wrong(
            "try_with",
            f"try_with {scenario.try_with!r} is not among the bad releases ({scenario.status.bad}):"
            " name one of them",
        )
    if (
        scenario.lab is not None
        and scenario.lab.vllm
        and (problem := _no_release(scenario.lab.vllm))
    ):
        wrong("lab", f"lab: vllm {problem}")
    for version in sorted(scenario.status.contradictions()):
        wrong("status", f"{version} is both bad and good: change one of the ranges")


def _check_baselines(scenario: Scenario, reading: Reading) -> None:
    """Check that each arm to compare with (`baseline=`) exists and has a server of its own.

    Also report throughput loads with different baselines, and loads with the same lengths and
    concurrency.
    """
    wrong = reading.wrong
    declared = scenario.loads if scenario.throughput else ()
    baselines = {load.baseline for load in declared}
    if len(baselines) > 1:
        wrong(
            "throughput", f"all loads need the same baseline, not {' and '.join(sorted(baselines))}"
        )
    named = [("throughput", name) for name in sorted(baselines - {""})]
    if scenario.output is not None and scenario.output.baseline:
        named.append(("output", scenario.output.baseline))
    for key, name in named:
        arm = _arm(scenario, reading, key, f"the baseline {name!r} is not an arm", name)
        with contextlib.suppress(CommandError):  # reported by _check_commands
            if arm is not None and not scenario.has_own_server(arm):
                wrong(
                    key,
                    f"the baseline {name!r} has the same server as an earlier arm: name that arm",
                )
    points = [point for load in declared for point in load.points]
    for point in sorted({point for point in points if points.count(point) > 1}):
        wrong("throughput", f"{point} is given twice: remove one")


def _check_alike(scenario: Scenario, reading: Reading) -> None:
    """Check that requests that need equal answers (`alike=`) are equal, greedy and sent once.

    Some arm must send all of a group.
    """
    for group in scenario.output.alike if scenario.output else ():
        problems = []
        whole = False
        for arm in scenario.arms:
            sent = [
                request
                for request in requests_of(scenario.workload_of(arm))
                if request.label in group
            ]
            whole = whole or {request.label for request in sent} == set(group)
            for request in sent:
                greedy = (
                    request.fields.get("temperature", 0 if request.prompt is not None else None)
                    == 0
                )
                if [other.label for other in sent].count(request.label) > 1:
                    problems.append(
                        f"{request.label!r} is sent twice: name its requests differently"
                    )
                elif isinstance(request.prompt, int | Size) and request.shared != request.prompt:
                    problems.append(
                        f"{request.label!r} has a new prompt each time: state it as a text or token"
                        " ids, or share all of it"
                    )
                elif not greedy:
                    problems.append(f"{request.label!r} is not greedy: add temperature 0")
                elif _body(request) != _body(sent[0]):
                    problems.append(
                        f"{request.label!r} and {sent[0].label!r} are not equal, so their answers"
                        " may differ"
                    )
        if not whole:
            problems.append(f"no arm sends all of {', '.join(group)}")
        for text in dict.fromkeys(problems):
            reading.wrong("output", f"alike: {text}")


def _body(request: Request) -> tuple[object, ...]:
    """Return the parts of a request that decide its right answer, to compare requests."""
    # The right answer does not depend on where the KV blocks of the prompt come from.
    fields = {name: value for name, value in request.fields.items() if name != "kv_transfer_params"}
    return request.endpoint, request.prompt, request.shared, request.max_tokens, fields


def _arm(scenario: Scenario, reading: Reading, key: str, problem: str, name: str) -> Arm | None:
    """Return the arm of this name. Without one, report `problem` for the argument `key`."""
    arm = scenario.arm(name)
    if arm is None:
        reading.wrong(key, problem + did_you_mean(name, [arm.name for arm in scenario.arms]))
    return arm


def _check_causes(scenario: Scenario, reading: Reading) -> None:
    """Report source changes of `causes=` with a wrong release, an unknown arm or no patch."""
    for change in scenario.causes.changes if scenario.causes else ():
        if problem := _no_release(change.release):
            reading.wrong("causes", f"cause {change.name!r}: release {problem}")
        if change.arm != "reported":  # a missing reported arm is a problem of the arms
            _arm(
                scenario,
                reading,
                "causes",
                f"cause {change.name!r}: there is no arm {change.arm!r}",
                change.arm,
            )
        if not change.patches:
            reading.wrong("causes", f"cause {change.name!r} changes nothing: add patched(…)")


def _check_triggers(scenario: Scenario, reading: Reading) -> None:
    """Check that some arm sends the requests and body fields that each trigger needs.

    Also report different requests of one name in an arm.
    """
    if not scenario.arms:
        return
    usual = [arm for arm in scenario.arms if arm.trigger is None] or scenario.arms
    wants = [(reading.line_of("trigger"), "", scenario.trigger, usual)]
    for arm in scenario.arms:
        if arm.trigger is not None:  # a near miss may omit the field that another arm sends
            senders = scenario.arms if arm.expected is Expected.UNTRIGGERED else [arm]
            wants.append((reading.at_arm(arm), f"arm {arm.name!r}: ", arm.trigger, senders))
    for line, whose, trigger, arms in wants:
        requests = [request for arm in arms for request in requests_of(scenario.workload_of(arm))]
        for need in trigger.wanted:
            text, near = _unsent(need, requests)
            if text:
                reading.problem(line, whose + text)
            if near in reading.words:
                text = f"{near!r}: a trigger waits for {' and '.join(need.fields)}"
                reading.problem(reading.words[near], f"{text}: correct the misspelt one")
    for arm in scenario.arms:
        names: dict[str, Request] = {}
        for request in requests_of(scenario.workload_of(arm)):
            # Equal requests are one that is sent again.
            if names.setdefault(request.name, request) != request and request.name:
                line = reading.at_arm(arm) if arm.workload else reading.line_of("workload")
                text = f"two requests are named {request.name!r}, so a trigger cannot tell them"
                reading.problem(line, f"{text} apart: rename one")


def check_fields(
    reading: Reading, scenario: Scenario, fields: Mapping[str, Collection[str]]
) -> None:
    """Report each body field of a request that its endpoint does not read.

    fields: names of the fields that a release reads, by endpoint. Endpoints without an entry are
    not checked.
    """
    for arm in scenario.arms:
        declares = arm.workload is not None or arm.trigger is not None
        needs = [need for need in (arm.trigger or scenario.trigger).wanted if need.fields]
        for request in requests_of(scenario.workload_of(arm)):
            for name in sorted(
                set(request.fields) - set(fields.get(request.endpoint, request.fields))
            ):
                text = f"{request.label}: the release does not read {name!r}"
                if any(
                    name in need.fields and need.carried_by(request.label, request.fields)
                    for need in needs
                ):
                    text += ", so its sent_with(…) can never be met there"
                problem = Problem(
                    reading.file,
                    reading.at_arm(arm) if declares else reading.line_of("workload"),
                    text,
                )
                if problem not in reading.problems:
                    reading.problems.append(problem)


def _unsent(need: Wanted, requests: Sequence[Request]) -> tuple[str, str]:
    """Return the problem of a trigger that no request can meet, and the body field to correct.

    The field is empty if none is like one that the trigger needs. Both are empty if a request can
    meet it.
    """
    sent = [request.fields for request in requests if need.name in ("", request.label)]
    if not sent:
        near = did_you_mean(need.name, [request.label for request in requests])
        return f"no request is named {need.name!r}, so its trigger can never be met{near}", ""
    if any(need.carried_by(need.name, fields) for fields in sent):
        return "", ""
    known = {name for fields in sent for name in fields}
    unsent = [name for name in need.fields if name not in known]
    names = " and ".join(need.fields)
    what = repr(unsent[0]) if unsent else f"{names} together"
    if any(Wanted(dict.fromkeys(need.fields)).carried_by("", fields) for fields in sent):
        what = f"{names} with these values"
    close = [
        sent_name
        for fields in sent
        for name in need.fields
        if name not in fields
        for sent_name in difflib.get_close_matches(name, sorted(fields.keys() - need.fields), 1)
    ][:1]
    near = f"; did you mean {close[0]!r}?" if close else ""
    who = f"no request named {need.name!r}" if need.name else "no request"
    return (
        f"{who} has {what}, so sent_with({', '.join(need.fields)}) can never be met{near}",
        "".join(close),
    )


def _check_arms(scenario: Scenario, reading: Reading) -> None:
    """Report wrong and doubled arm names, and releases or workloads that do not fit an arm."""
    names: set[str] = set()
    for arm in scenario.arms:
        problems = []
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", arm.name):
            problems.append(f"arm name {arm.name!r} must be lower-case words joined by hyphens")
        if arm.name in names:
            problems.append(f"two arms are named {arm.name!r}: rename one")
        names.add(arm.name)
        whose = f"arm {arm.name!r}"
        if arm.bad and not arm.expected.has_bug:
            problems.append(
                f"{whose}: bad= is only for an arm that `dies`, `errs`, `hangs` or `spins`: remove"
                " it"
            )
        if arm.expected is Expected.SPINS and not any(
            isinstance(step, Rest) for step in scenario.workload_of(arm)
        ):
            problems.append(
                f"{whose} spins, but its workload has no rest(…): add rest(within=30) at its end"
            )
        for version in sorted(scenario.status_of(arm).contradictions() if arm.bad else ()):
            problems.append(f"{whose}: {version} is both bad and good: change one of the ranges")
        for text in problems:
            reading.problem(reading.at_arm(arm), text)


def _check_tiny_model(scenario: Scenario, reading: Reading, key: str, dummy: Dummy) -> None:
    """Report changes for the tiny model without a reason, and impossible shapes of it.

    key: argument of `Scenario(...)` that declares it, "lab" or "dummy".
    """
    for change in dummy.changes:
        if not change.why:
            reading.problem(
                reading.line_of(key),
                f"{key}: `{change}` has no why=: add the reason for the report",
            )
    try:
        dummy.shape(scenario.model)
    except ValueError as error:
        reading.wrong(key, f"{key}: {error}")


def _check_commands(
    scenario: Scenario,
    reading: Reading,
    seen: set[str],
    key: str,
    command_of: Callable[[Arm], ServeCommand],
) -> None:
    """Check the command of each arm and the sizes of its requests.

    key: argument that changes the commands, "lab" or "dummy"; empty for those of the arms alone.
    seen: mistakes that were reported before; new ones are added, so each is reported once.
    """
    for arm in scenario.arms:
        line, whose = (
            reading.at_arm(arm),
            (f"{key}, arm {arm.name!r}" if key else f"arm {arm.name!r}"),
        )
        edited = reading.line_of(key) if key and arm is scenario.arms[0] else line
        mistakes: list[tuple[int, str]] = []
        try:
            command = command_of(arm)
            mistakes += [(edited, mistake) for mistake in flag_mistakes(command.flags)]
            shared = (
                reading.line_of(key)
                if key
                else reading.line_of("workload")
                if not (arm.workload or arm.edits)
                else line
            )
            mistakes += [
                (shared, text) for text in _wrong_sizes(scenario, arm, command, in_lab=key == "lab")
            ]
        except (CommandError, ScenarioError) as error:
            mistakes.append((reading.line_of(key) if key else line, str(error)))
        for where, text in mistakes:
            if text not in seen:
                seen.add(text)
                reading.problem(where, f"{whose}: {text}")


def _wrong_sizes(
    scenario: Scenario, arm: Arm, command: ServeCommand, *, in_lab: bool
) -> Iterator[str]:
    """Yield a message for each request of a wrong size.

    It has no tokens, or its prompt and answer exceed `--max-model-len`. in_lab: use the sizes of
    the lab. Raises `CommandError` or `ScenarioError` if a size cannot be resolved.
    """
    limited = command.get("--max-model-len") not in (None, "auto", "-1")
    longest = command.number("--max-model-len") or 0 if limited else math.inf
    for request in requests_of(scenario.workload_of(arm)):
        if request.prompt is None:
            continue  # a body is sent as it is
        # Only the server can count the tokens of a text: at least one.
        prompt = len(request.ids) or 1
        if isinstance(request.prompt, int | Size):
            prompt = resolve(request.prompt, command, in_lab=in_lab)
        answer = resolve(request.max_tokens, command, in_lab=in_lab)
        if prompt < 1:
            yield f"{request} has no tokens: at least 1 is needed"
        refusable = 400 in request.may_fail or "truncate_prompt_tokens" in request.fields
        if prompt + answer > longest and not refusable:
            yield f"{request} and an answer of {answer} tokens exceed --max-model-len {longest}"
