"""Reads scenario files, and finds every mistake in one with its line.

A scenario file is a declaration, so it is read as one: its syntax tree is evaluated here, word by word, over the vocabulary of
`vllm_repro.vocabulary` and nothing else. That has two uses. A file from a stranger cannot run code. And a mistake does not hide the
next one: evaluation goes on past it, so `vllm-repro check` names them all, each with file and line, where an import would stop at the
first.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import add, and_, mul, or_, sub
from pathlib import Path
from typing import Any

from beartype import BeartypeConf
from beartype.door import is_bearable

from vllm_repro import vocabulary
from vllm_repro.commands.command import ServeCommand
from vllm_repro.commands.flags import NoteLevel, unknown_flags
from vllm_repro.errors import CommandError, ScenarioError
from vllm_repro.lab.plugin.vllm_repro_lab.parts import MECHANISMS
from vllm_repro.scenario import Arm, Dummy, Scenario
from vllm_repro.sizes import Size, resolve
from vllm_repro.verdict import Expected, Standing
from vllm_repro.workload import Rest, requests_of

__all__ = ["Problem", "check_file", "load_file", "read"]

WORDS: Mapping[str, Any] = {name: getattr(vocabulary, name) for name in vocabulary.__all__}
_NUMBERS = BeartypeConf(is_pep484_tower=True)  # an int is a float, as for a type checker
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.BitAnd: and_,
    ast.BitOr: or_,
}


_STAND_INS: Mapping[str, Any] = {
    "id": "stand-in",
    "issue": "owner/repository#1",
    "title": "stand-in",
    "command": "vllm serve stand-in",
    "model": vocabulary.Model("stand-in", 1, 1, 1, 1, 1),
    "needs": vocabulary.Needs(),
    "status": vocabulary.Status(bad=">=0"),
    "try_with": "0.1.0",
    "workload": (vocabulary.completion(prompt="x"),),
    "trigger": vocabulary.sent_with("x"),
    "signature": vocabulary.signature(exception="X", message="", frames=("x",), phase="request"),
    "arms": (vocabulary.arm("reported", vocabulary.dies),),
}


@dataclass(frozen=True, order=True)
class Problem:
    """One mistake. `line` counts from 1."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


_A_SLIP = 0.85
"""How alike `promt` and `prompt` are, at the least. `min_tokens` and `max_tokens`, two fields of the API, are 0.8."""


class _Bad:
    """Stands for a value that could not be made, so that its users are not reported as well."""


_BAD = _Bad()


def _near(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _fits(value: Any, hint: Any) -> bool:
    """Whether the value is what the hint takes. beartype looks at one element of a list, by chance; a mistake may be in any."""
    whole = is_bearable(value, hint, conf=_NUMBERS)
    return whole and (not isinstance(value, tuple) or all(is_bearable((one,), hint, conf=_NUMBERS) for one in value))


@dataclass
class _Reader:
    """Evaluates one file. `lines` remembers where each argument of the `Scenario(...)` call and each arm stands."""

    file: str
    problems: list[Problem] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=lambda: dict(WORDS))
    lines: dict[str, int] = field(default_factory=dict)
    scenario_line: int = 1
    imported: set[str] = field(default_factory=set)
    partly: Scenario | None = None
    made_up: set[str] = field(default_factory=set)

    def problem(self, line: int, text: str) -> _Bad:
        self.problems.append(Problem(self.file, line, text))
        return _BAD

    def module(self, tree: ast.Module) -> Any:
        for number, statement in enumerate(tree.body):
            match statement:
                case ast.Expr(value=ast.Constant(value=str())) if number == 0:
                    pass  # the docstring
                case ast.ImportFrom(module="__future__"):
                    pass
                case ast.ImportFrom(module="vllm_repro.vocabulary"):
                    for alias in statement.names:
                        self.imported.add(alias.name)
                        if alias.name not in WORDS:
                            self.problem(
                                alias.lineno, f"the vocabulary has no {alias.name!r}{_near(alias.name, WORDS)}"
                            )
                case ast.Assign(targets=[ast.Name(id=name)]):
                    self.names[name] = self.value(statement.value)
                case _:
                    self.problem(
                        statement.lineno,
                        "a scenario file only imports from vllm_repro.vocabulary and assigns names; it is read, not run",
                    )
        if "scenario" not in self.names:
            return self.problem(1, "no `scenario = Scenario(...)` in this file")
        return self.names["scenario"]

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id=name):
                if name in WORDS and name not in self.imported:
                    self.problem(node.lineno, f"{name!r} is used and not imported from vllm_repro.vocabulary")
                    self.imported.add(name)  # once is enough
                if name in self.names:
                    return self.names[name]
                return self.problem(node.lineno, f"unknown word {name!r}{_near(name, self.names)}")
            case ast.List(elts=items) | ast.Tuple(elts=items):
                # A bad element is named already; the others can still be checked.
                return tuple(value for item in items if (value := self.value(item)) is not _BAD)
            case ast.Dict(keys=keys, values=items) if all(keys):
                pairs = [(self.value(key), self.value(item)) for key, item in zip(keys, items, strict=True) if key]
                return _BAD if any(_BAD in pair for pair in pairs) else dict(pairs)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.value(operand)
                return (
                    -inner if isinstance(inner, int | float) else self.problem(node.lineno, "only a number has a minus")
                )
            case ast.BinOp(left=left, op=operator, right=right):
                return self._binary(node.lineno, self.value(left), operator, self.value(right))
            case ast.Call():
                return self._call(node)
        return self.problem(node.lineno, f"`{ast.unparse(node)}` is no part of a declaration")

    def _binary(self, line: int, left: Any, operator: ast.operator, right: Any) -> Any:
        if left is _BAD or right is _BAD:
            return _BAD
        function = _OPERATORS.get(type(operator))
        if function is None:
            return self.problem(line, "only + - * for sizes and & | for conditions are known here")
        try:
            return function(left, right)
        except TypeError:
            return self.problem(line, f"a {type(left).__name__} and a {type(right).__name__} do not go together here")

    def _call(self, node: ast.Call) -> Any:
        target = self.value(node.func) if isinstance(node.func, ast.Name) else _BAD
        if not isinstance(node.func, ast.Name):
            return self.problem(node.lineno, f"`{ast.unparse(node.func)}` is no word of the vocabulary")
        arguments = [self.value(argument) for argument in node.args]
        keywords = {word.arg: self.value(word.value) for word in node.keywords if word.arg}
        if target is _BAD:
            return _BAD
        if not callable(target):
            return self.problem(node.lineno, f"{node.func.id!r} cannot be called")
        if target is Scenario:
            self._remember(node)
        where = {word.arg: word.value.lineno for word in node.keywords if word.arg}
        if self._arguments_wrong(node, node.func.id, target, arguments, keywords, where):
            if target is Scenario:
                self.partly = self._with_stand_ins(keywords)
            return _BAD
        if any(value is _BAD for value in (*arguments, *keywords.values())):
            if target is Scenario:
                self.partly = self._with_stand_ins(keywords)
            return _BAD
        try:
            return target(*arguments, **keywords)
        except (TypeError, ValueError) as error:
            return self.problem(node.lineno, f"{node.func.id}: {error}")

    def _with_stand_ins(self, keywords: dict[str, Any]) -> Scenario | None:
        """The scenario with what is missing or wrong made up, so that the rest can be checked; None where that makes no sense."""
        hints = typing.get_type_hints(Scenario)
        good = {
            name: value
            for name, value in keywords.items()
            if name in hints and value is not _BAD and _fits(value, hints[name])
        }
        self.made_up = set(_STAND_INS) - set(good)
        try:
            return Scenario(**{**_STAND_INS, **good})
        except (TypeError, ValueError):
            return None

    def _remember(self, node: ast.Call) -> None:
        self.scenario_line = node.lineno
        for word in node.keywords:
            if word.arg:
                self.lines[word.arg] = word.value.lineno
            if word.arg == "arms" and isinstance(word.value, ast.List | ast.Tuple):
                self.lines |= {f"arms[{i}]": item.lineno for i, item in enumerate(word.value.elts)}

    def _arguments_wrong(
        self,
        node: ast.Call,
        word: str,
        target: Callable[..., Any],
        arguments: list[Any],
        keywords: dict[str, Any],
        where: dict[str, int],
    ) -> bool:
        signature = inspect.signature(target)
        parameters = signature.parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        wrong = False
        for name in [name for name in keywords if name not in parameters]:
            # An open-ended word takes any field of the API, so there only what is all but one of its own is a mistake.
            if not open_ended or difflib.get_close_matches(name, parameters, cutoff=_A_SLIP):
                self.problem(where[name], f"{word} has no {name!r}{_near(name, parameters)}")
                del keywords[name]
                wrong = True
        try:
            bound = signature.bind_partial(*arguments, **keywords)
        except TypeError as error:
            self.problem(node.lineno, f"{word}: {error}")
            return True
        missing = [
            name
            for name, p in parameters.items()
            if name not in bound.arguments and p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        if missing:
            self.problem(node.lineno, f"{word} lacks {', '.join(map(repr, missing))}")
            wrong = True
        hints = typing.get_type_hints(target.__init__ if inspect.isclass(target) else target)
        for name, value in bound.arguments.items():
            kind = parameters[name].kind
            values = value if kind is inspect.Parameter.VAR_POSITIONAL else (value,)
            if kind is inspect.Parameter.VAR_KEYWORD or name not in hints:
                continue
            for one in values:
                if one is not _BAD and not _fits(one, hints[name]):
                    self.problem(
                        where.get(name, node.lineno), f"{word}: {name}={_short(one)} is not what {name!r} takes"
                    )
                    wrong = True
        return wrong


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read(path: Path, text: str | None = None) -> tuple[Scenario | None, list[Problem]]:
    """The scenario of a file and its problems; the scenario is None where one of them keeps it from being made."""
    name = str(path)
    try:
        source = path.read_text(encoding="utf-8") if text is None else text
        tree = ast.parse(source, filename=name)
    except SyntaxError as error:
        return None, [Problem(name, error.lineno or 1, f"not Python: {error.msg}")]
    except (OSError, UnicodeDecodeError) as error:
        return None, [Problem(name, 1, f"cannot be read: {error}")]
    reader = _Reader(name)
    value = reader.module(tree)
    if not ast.get_docstring(tree):
        reader.problem(1, "the file does not say what the bug is: begin with a docstring")
    if isinstance(value, Scenario):
        _check_meaning(reader, path, value)
        return replace(value, about=ast.get_docstring(tree) or ""), sorted(reader.problems)
    if reader.partly is not None:
        _check_meaning(reader, path, reader.partly)
    elif value is not _BAD:
        reader.problem(1, "`scenario` is not a Scenario(...)")
    return None, sorted(set(reader.problems))


def _check_meaning(reader: _Reader, path: Path, scenario: Scenario) -> None:
    """What each word cannot know by itself: that the parts fit together. What was made up is not held against anything."""

    def at(key: str) -> int:
        return reader.lines.get(key, reader.scenario_line)

    def wrong(key: str, text: str, *with_keys: str) -> None:
        if not reader.made_up & {key.partition("[")[0], *with_keys}:
            reader.problem(at(key), text)

    if scenario.id != path.stem.replace("_", "-"):
        wrong("id", f"id {scenario.id!r} does not match the file's name {path.name!r}")
    if not scenario.title.strip():
        wrong("title", "the title is empty")
    for key, issues in (("issue", (scenario.issue,)), ("related", tuple(scenario.related))):
        for issue in issues:
            if not re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", issue):
                wrong(key, f"{issue!r} is no upstream issue, such as 'vllm-project/vllm#41726'")
    if scenario.status.standing(scenario.try_with) is not Standing.BAD:
        text = f"try_with {scenario.try_with!r} is not among the bad releases ({scenario.status.bad})"
        wrong("try_with", text, "status")
    for version in sorted(scenario.status.contradictions()):
        wrong("status", f"{version} is both bad and good")
    if scenario.signature is None and any(arm.expected is Expected.DIES for arm in scenario.arms):
        wrong("arms", "an arm `dies`, and no signature= says of what")
    if scenario.signature is not None and not scenario.signature.frames:
        wrong(
            "signature", "a signature without frames matches too much: name the functions that the death goes through"
        )
    if not list(requests_of(tuple(scenario.workload))):
        wrong("workload", "the workload sends no request")
    try:
        command = scenario.reported()
    except CommandError as error:
        if "command" not in reader.made_up:
            reader.problem(at("command") + error.line - 1, f"command: {error}")
        return
    for unknown in unknown_flags(command, scenario.try_with):
        if unknown.level is not NoteLevel.UNLISTED:  # the table does not claim to hold every flag there is
            reader.problem(at("command"), f"command: {unknown}")
    if not scenario.arms:
        wrong("arms", "no arms: at least `arm('reported', dies)`")
        return
    first = scenario.arms[0]
    if first.edits or not first.expected.has_bug:
        wrong(
            "arms[0]",
            "the first arm is the reported command itself: it `dies`, `errs`, `hangs` or `spins` and has no edits",
        )
    if reader.made_up & {"command", "arms"}:
        return  # arms edit the command; with either made up nothing can be said of them
    _check_baselines(scenario, wrong)
    if scenario.lab is not None:
        if scenario.lab.mechanism not in MECHANISMS:
            near = _near(scenario.lab.mechanism, MECHANISMS)
            wrong("lab", f"the lab has no mechanism {scenario.lab.mechanism!r}{near}")
        _check_stand_in(reader, at("lab"), "lab", scenario, scenario.lab, scenario.command_in_lab)
    if scenario.dummy is not None:
        _check_stand_in(reader, at("dummy"), "dummy", scenario, scenario.dummy, scenario.command_with_dummy)
    for change in scenario.causes.changes if scenario.causes else ():
        if scenario.arm(change.arm) is None:
            near = _near(change.arm, [arm.name for arm in scenario.arms])
            wrong("causes", f"cause {change.name!r}: there is no arm {change.arm!r}{near}")
        if not change.patches:
            wrong("causes", f"cause {change.name!r} changes nothing: patched(…) says what")
    seen: set[str] = set()
    for index, arm in enumerate(scenario.arms):
        _check_arm(reader, at(f"arms[{index}]"), scenario, arm, seen)


def _check_baselines(scenario: Scenario, wrong: Callable[[str, str], None]) -> None:
    """The arms that others are held against must be there, and be measured themselves."""
    baselines = {load.baseline for load in scenario.loads}
    if len(baselines) > 1:
        wrong("throughput", f"one baseline for all loads, not {' and '.join(sorted(baselines))}")
    named = [("throughput", name) for name in sorted(baselines)]
    if scenario.output is not None and scenario.output.baseline:
        named.append(("output", scenario.output.baseline))
    for key, name in named:
        arm = scenario.arm(name)
        if arm is None:
            wrong(key, f"the baseline {name!r} is no arm{_near(name, [arm.name for arm in scenario.arms])}")
            continue
        with contextlib.suppress(CommandError):  # said where the arm is looked at
            if not scenario.has_own_server(arm):
                wrong(key, f"the baseline {name!r} has the server of an earlier arm, which is the one to name")
    points = [point for load in scenario.loads for point in load.points]
    for point in sorted({point for point in points if points.count(point) > 1}):
        wrong("throughput", f"{point}: twice")


def _check_stand_in(
    reader: _Reader, line: int, key: str, scenario: Scenario, dummy: Dummy, command_of: Callable[[Arm], ServeCommand]
) -> None:
    for change in dummy.changes:
        if not change.why:
            reader.problem(line, f"{key}: `{change}` has no why=: the report lists each change with its reason")
    try:
        dummy.shape(scenario.model)
    except ValueError as error:
        reader.problem(line, f"{key}: {error}")
    for arm in scenario.arms:
        try:
            command_of(arm)
        except CommandError as error:
            reader.problem(line, f"{key}, arm {arm.name!r}: {error}")


def _check_arm(reader: _Reader, line: int, scenario: Scenario, arm: Arm, seen: set[str]) -> None:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", arm.name):
        reader.problem(line, f"arm name {arm.name!r} is not lower-case words joined by hyphens")
    if arm.name in seen:
        reader.problem(line, f"two arms are named {arm.name!r}")
    seen.add(arm.name)
    if arm.bad and not arm.expected.has_bug:
        reader.problem(line, f"arm {arm.name!r}: bad= names the releases in which an arm dies, and this one does not")
    looks = any(isinstance(step, Rest) for step in scenario.workload_of(arm))
    if arm.expected is Expected.SPINS and not looks:
        reader.problem(line, f"arm {arm.name!r} spins, and its workload does not look: rest(within=30) at its end does")
    for version in sorted(scenario.status_of(arm).contradictions() if arm.bad else ()):
        reader.problem(line, f"arm {arm.name!r}: {version} is both bad and good")
    try:
        command = scenario.command_of(arm)
        for request in requests_of(scenario.workload_of(arm)):
            if isinstance(request.prompt, int | Size) and resolve(request.prompt, command) < 1:
                reader.problem(line, f"arm {arm.name!r}: {request} has no tokens")
    except (CommandError, ScenarioError) as error:
        if str(error) not in seen:  # a mistake in the shared workload is not one of every arm
            reader.problem(line, f"arm {arm.name!r}: {error}")
            seen.add(str(error))


def check_file(path: Path) -> list[Problem]:
    """Every problem of one scenario file; an empty list means that it can be run."""
    return read(path)[1]


def load_file(path: Path) -> Scenario:
    """The scenario of a file. Raises `ScenarioError` naming every problem."""
    scenario, problems = read(path)
    if problems or scenario is None:
        raise ScenarioError("\n".join(map(str, problems)), hint=f"vllm-repro check {path} lists what to mend")
    return scenario
