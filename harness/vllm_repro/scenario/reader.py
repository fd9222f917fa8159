"""Reader of scenario files that reports every mistake with its line.

A file is not imported. Its syntax tree is evaluated with the words of `vllm_repro.vocabulary` only.
So a file cannot run code, and `vllm-repro check` reports all mistakes at once: first those of
single words, then those between the parts of a scenario.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import shlex
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import add, and_, mul, or_, sub
from pathlib import Path
from typing import Any, Literal

from vllm_repro.errors import ScenarioError
from vllm_repro.scenario import vocabulary
from vllm_repro.scenario.checks import Problem, Reading, check_fields, check_meaning, did_you_mean
from vllm_repro.scenario.scenario import NOT_STATED, Arm, Scenario
from vllm_repro.scenario.workload import Size
from vllm_repro.trigger.trigger import UNSTATED, Condition

WORDS: Mapping[str, Any] = {name: getattr(vocabulary, name) for name in vocabulary.__all__}
"""The words that a scenario file may use, and what they stand for."""
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: add,
    ast.Sub: sub,
    ast.Mult: mul,
    ast.BitAnd: and_,
    ast.BitOr: or_,
}
_OPERANDS: Mapping[type[ast.operator], Sequence[tuple[type, type]]] = {
    ast.Add: ((int, int), (float, float), (Size, int), (int, Size), (str, str), (tuple, tuple)),
    ast.Sub: ((int, int), (float, float), (Size, int)),
    ast.Mult: ((int, int), (float, float), (Size, int), (int, Size), (tuple, int)),
    ast.BitAnd: ((Condition, Condition),),
    ast.BitOr: ((Condition, Condition),),
}
"""Allowed operands, fewer than in Python. A list times a number makes a prompt of token ids."""

_BLANKS: Mapping[Any, Any] = {int: 0, str: NOT_STATED}
"""Values in place of `unstated()`, by the type of the argument; None for another type."""

_LARGEST = 2**63
_LONGEST = 1_000_000
_TOO_LARGE = "too large: a number is at most 2**63, a string or list at most 1,000,000 long"

_TYPO_RATIO = 0.85
"""Smallest `difflib` ratio of a typo such as `promt`.

`min_tokens` and `max_tokens`, two fields of the API, have 0.8.
"""


class _Bad:
    """Placeholder for a wrong value, so that its later uses are not reported too."""


_BAD = _Bad()


def _fits(value: Any, hint: Any) -> bool:
    """Return True if the value has the type of the hint.

    A list of the file is a tuple here. An int also fits float; a string fits no sequence.
    """
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, member) for member in inside)
    if origin is Literal:
        return value in inside
    if origin is Sequence or (origin is tuple and inside[-1] is ...):
        return isinstance(value, tuple) and all(_fits(item, inside[0]) for item in value)
    if origin is tuple:
        return (
            isinstance(value, tuple)
            and len(value) == len(inside)
            and all(map(_fits, value, inside))
        )
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            _fits(k, inside[0]) and _fits(v, inside[1]) for k, v in value.items()
        )
    return isinstance(value, (int, float) if hint is float else hint)


@dataclass
class _Reader(Reading):
    """Evaluator of a scenario file's syntax tree, which collects problems with their lines."""

    # Values by name: the vocabulary, and what the file has assigned so far.
    names: dict[str, Any] = field(default_factory=lambda: dict(WORDS))
    # Words that the file imports.
    imported: set[str] = field(default_factory=set)

    def bad(self, line: int, text: str) -> _Bad:
        """Report a problem, and return the placeholder for a wrong value."""
        self.problem(line, text)
        return _BAD

    def module(self, tree: ast.Module) -> Any:
        """Evaluate a file and return the value of its `scenario`; report a file that lacks it.

        Also report statements that a scenario file may not have.
        """
        for number, statement in enumerate(tree.body):
            match statement:
                case ast.Expr(value=ast.Constant(value=str())) if number == 0:
                    pass  # the docstring
                case ast.ImportFrom(module="__future__"):
                    pass
                case ast.ImportFrom(module="vllm_repro.vocabulary"):
                    for alias in statement.names:
                        self.imported |= set(WORDS) if alias.name == "*" else {alias.name}
                        if alias.name not in {*WORDS, "*"}:
                            self.problem(
                                alias.lineno,
                                "vllm_repro.vocabulary has no"
                                f" {alias.name!r}{did_you_mean(alias.name, WORDS)}",
                            )
                case ast.Assign(targets=[ast.Name(id=name)]):
                    try:
                        self.names[name] = self.value(statement.value)
                    except RecursionError:
                        self.names[name] = self.bad(
                            statement.lineno,
                            f"{name} is nested too deeply: split it into named values",
                        )
                case _:
                    self.problem(
                        statement.lineno,
                        "remove this: a scenario file may only import from vllm_repro.vocabulary"
                        " and assign names",
                    )
        if "scenario" not in self.names:
            return self.bad(1, "there is no `scenario = Scenario(...)` in this file: add it")
        return self.names["scenario"]

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression, or report it and return the placeholder."""
        match node:
            case ast.Constant():
                return self._small(node.lineno, node.value)
            case ast.Name(id=name):
                if name in WORDS and name not in self.imported:
                    self.problem(
                        node.lineno,
                        f"{name!r} is not imported: add it to the import from"
                        " vllm_repro.vocabulary",
                    )
                    self.imported.add(name)  # report it once
                if name in self.names:
                    return self.names[name]
                return self.bad(
                    node.lineno, f"unknown name {name!r}{did_you_mean(name, self.names)}"
                )
            case ast.List(elts=items) | ast.Tuple(elts=items):
                values = tuple(map(self.value, items))
                return _BAD if _BAD in values else values
            case ast.Dict(keys=keys, values=items) if all(keys):
                for key in keys:
                    if isinstance(key, ast.Constant):
                        self.words.setdefault(str(key.value), key.lineno)
                pairs = [
                    (self.value(key), self.value(item))
                    for key, item in zip(keys, items, strict=True)
                    if key
                ]
                if any(key is _BAD or value is _BAD for key, value in pairs):
                    return _BAD
                if not all(isinstance(key, str | int | float) for key, _ in pairs):
                    return self.bad(node.lineno, "a key must be a string or a number")
                return dict(pairs)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self.value(operand)
                if isinstance(inner, int | float):
                    return -inner
                return (
                    inner
                    if inner is _BAD
                    else self.bad(node.lineno, "a minus sign is only for numbers")
                )
            case ast.BinOp():
                return self._binary(node)
            case ast.Call():
                return self._call(node)
        return self.bad(
            node.lineno,
            f"`{ast.unparse(node)}` is not allowed here: use constants, lists, names and words of"
            " vllm_repro.vocabulary",
        )

    def _binary(self, node: ast.BinOp) -> Any:
        """Return the value of an operation (`flag(…) + 129`), or report a wrong one."""
        line, left, right = node.lineno, self.value(node.left), self.value(node.right)
        if left is _BAD or right is _BAD:
            return _BAD
        function = _OPERATORS.get(type(node.op))
        if function is None:
            return self.bad(line, "only + - * for sizes and & | for conditions are allowed here")
        for value, operand in ((left, node.left), (right, node.right)):
            if inspect.isroutine(value) or inspect.isclass(value):
                return self.bad(
                    operand.lineno,
                    f"`{ast.unparse(operand)}` needs parentheses: write {_called(value)}",
                )
        if not any(_is_each(kinds, left, right) for kinds in _OPERANDS[type(node.op)]):
            return self.bad(
                line,
                f"{_type_name(type(left))} and {_type_name(type(right))} cannot be combined here",
            )
        if isinstance(left, tuple) and isinstance(right, int) and len(left) * right > _LONGEST:
            return self.bad(line, _TOO_LARGE)
        return self._small(line, function(left, right))

    def _small(self, line: int, value: Any) -> Any:
        """Return the value if it is small enough, else report it and return the placeholder.

        Without a limit, a file that doubles a text on each line could fill the memory.
        """
        if (isinstance(value, int) and abs(value) > _LARGEST) or (
            isinstance(value, str | tuple) and len(value) > _LONGEST
        ):
            return self.bad(line, _TOO_LARGE)
        return value

    def _call(self, node: ast.Call) -> Any:
        """Return the result of a call of a vocabulary word, or report a wrong call.

        Also note the lines of arms, arguments and `Scenario(...)`. An argument `unstated()` is
        replaced by a blank, except `trigger=`.
        """
        target = self.value(node.func) if isinstance(node.func, ast.Name) else _BAD
        if not isinstance(node.func, ast.Name):
            return self.bad(
                node.lineno, f"`{ast.unparse(node.func)}` is not a word of vllm_repro.vocabulary"
            )
        arguments = [self.value(argument) for argument in node.args]
        keywords: dict[str, Any] = {}
        for word in node.keywords:
            value = self.value(word.value)
            if word.arg is None:
                self.problem(word.value.lineno, "** is not supported: write out each argument")
            elif word.arg in keywords:
                self.problem(
                    word.value.lineno, f"{node.func.id}: {word.arg}= is given twice: remove one"
                )
            else:
                keywords[word.arg] = value
        if target is _BAD:
            return _BAD
        if not callable(target):
            return self.bad(
                node.lineno, f"{node.func.id!r} cannot be called: write it without parentheses"
            )
        keywords = {
            name: _BLANKS.get(_hints(target).get(name))
            if isinstance(value, Condition) and value.words == UNSTATED and name != "trigger"
            else value
            for name, value in keywords.items()
        }
        where = {word.arg: word.value.lineno for word in node.keywords if word.arg}
        self.words = where | self.words
        if target is Scenario:
            self.scenario_line, self.lines = node.lineno, where
        wrong = self._arguments_wrong(node, node.func.id, target, arguments, keywords, where)
        if wrong or any(value is _BAD for value in (*arguments, *keywords.values())):
            return _BAD
        try:
            made = target(*arguments, **keywords)
            if isinstance(made, Arm):
                self.arm_lines[id(made)] = node.lineno
            return made
        except (TypeError, ValueError) as error:
            return self.bad(node.lineno, f"{node.func.id}: {error}")

    def _arguments_wrong(
        self,
        node: ast.Call,
        word: str,
        target: Callable[..., Any],
        arguments: list[Any],
        keywords: dict[str, Any],
        where: dict[str, int],
    ) -> bool:
        """Report a call's wrong, missing and unknown arguments. Return True if there are any.

        word: name of `target` in the file. where: line of each keyword argument.
        """
        signature, hints = _signature(target), _hints(target)
        parameters = signature.parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        # An open-ended word takes any field of the API, so only a typo of one of its own parameters
        # is a mistake.
        unknown = [
            name
            for name in keywords
            if name not in parameters
            and (not open_ended or difflib.get_close_matches(name, parameters, cutoff=_TYPO_RATIO))
        ]
        for name in unknown:
            self.problem(
                where[name], f"{word} has no argument {name!r}{did_you_mean(name, parameters)}"
            )
        if unknown:
            return True
        try:
            bound = signature.bind_partial(*arguments, **keywords).arguments
        except TypeError as error:
            self.problem(node.lineno, f"{word}: {error}")
            return True
        variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        required = [
            name
            for name, p in parameters.items()
            if p.default is p.empty and p.kind not in variable
        ]
        missing = [name for name in required if name not in bound]
        if missing:
            self.problem(node.lineno, f"{word}: missing {', '.join(map(repr, missing))}")
        wrong = bool(missing)
        for name, value in bound.items():
            kind = parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD or name not in hints:
                continue
            for item in value if kind is inspect.Parameter.VAR_POSITIONAL else (value,):
                if item is not _BAD and not _fits(item, hints[name]):
                    problem = (
                        f"{word}: {name}={_short(item)} must be"
                        f" {_type_name(hints[name])}{_correction(item, hints[name])}"
                    )
                    self.problem(where.get(name, node.lineno), problem)
                    wrong = True
        return wrong


def _type_name(hint: Any) -> str:
    """Return the type of an argument in words: `a number or None`."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_type_name, inside)))
    if origin is Literal:
        return " or ".join(map(repr, inside))
    if origin in (Sequence, tuple) or hint is tuple:
        return "a list"
    if origin is Mapping:
        return "a dictionary"
    names = {
        Condition: "a condition",
        Size: "a size",
        str: "a string",
        int: "a whole number",
        float: "a number",
    }
    names |= {bool: "True or False", type(None): "None"}
    names |= {value: f"{name}(…)" for name, value in WORDS.items() if inspect.isclass(value)}
    return names.get(hint) or f"a {getattr(hint, '__name__', hint)}"


def _correction(value: Any, hint: Any) -> str:
    """Return how to correct an argument of a wrong type; empty if that is not obvious."""
    if not isinstance(value, tuple) and _fits((value,), hint):
        return ": write a list, with brackets"
    return f": write {_called(value)}" if inspect.isroutine(value) else ""


def _is_each(kinds: tuple[type, type], *values: Any) -> bool:
    """Return True if each value has the type at its place in `kinds`.

    An int counts as float; True and False are not numbers.
    """
    return all(
        isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)
        for kind, value in zip(kinds, values, strict=True)
    )


@lru_cache
def _signature(word: Callable[..., Any]) -> inspect.Signature:
    """Return the Python signature of a vocabulary word, from a cache."""
    return inspect.signature(word)


@lru_cache
def _hints(word: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of a vocabulary word's parameters by name, from a cache."""
    return typing.get_type_hints(word.__init__ if inspect.isclass(word) else word)


def _called(word: Any) -> str:
    """Return the call of a word as text: `drafting()`, or `chat(…)` if it needs arguments."""
    needed = any(p.default is p.empty for p in inspect.signature(word).parameters.values())
    return f"{word.__name__}({'…' if needed else ''})"


def _short(value: Any) -> str:
    """Return a value as text of at most 60 letters, for a message."""
    text = value.__name__ if inspect.isroutine(value) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def read(
    path: Path, text: str | bytes | None = None, fields: Mapping[str, Collection[str]] | None = None
) -> tuple[Scenario | None, list[Problem]]:
    """Return the scenario of a file and its problems, sorted by line.

    The scenario is None if a problem prevents making it; a file that cannot be read is a problem,
    too. text: content to read in place of the file's. fields: body fields that a release reads, by
    endpoint; None to check for no release.
    """
    name = str(path)
    try:
        # Bytes, so that Python handles a byte order mark and an encoding line.
        tree = ast.parse(path.read_bytes() if text is None else text, filename=name)
    except SyntaxError as error:
        return None, [Problem(name, error.lineno or 1, f"not Python: {error.msg}")]
    except (OSError, ValueError) as error:  # ValueError: a null byte, or bytes that are not UTF-8
        return None, [Problem(name, 1, f"cannot be read: {error}")]
    except (RecursionError, MemoryError):  # Python's parser, for a hundred nested brackets
        return None, [Problem(name, 1, "not Python: nested too deeply")]
    reader = _Reader(name)
    value = reader.module(tree)
    if not ast.get_docstring(tree):
        reader.problem(1, "there is no description of the bug: begin with a docstring")
    if isinstance(value, Scenario):
        check_meaning(reader, path, value)
        if fields is not None:
            check_fields(reader, value, fields)
        return replace(value, about=ast.get_docstring(tree) or ""), sorted(set(reader.problems))
    if value is not _BAD:
        reader.problem(1, "`scenario` is not a Scenario(...)")
    return None, sorted(set(reader.problems))


def gaps(path: Path) -> Iterator[Problem]:
    """Yield what a draft does not state: each `# GAP:` line, and each `unstated()` below none."""
    before = ""
    for number, line in enumerate(path.read_text("utf-8", "replace").split("\n"), 1):
        if "# GAP: " in line or (UNSTATED in line and "# GAP: " not in before):
            yield Problem(str(path), number, f"gap: {line.strip().removeprefix('# GAP: ')}")
        before = line


def load_file(path: Path) -> Scenario:
    """Return the scenario of a file.

    Raises `ScenarioError` with every problem. An unchanged file is read once.
    """
    try:
        content = path.read_bytes()
    except OSError:
        content = None  # `read` reports why
    return _load(path, content)


@lru_cache(maxsize=256)
def _load(path: Path, content: bytes | None) -> Scenario:
    """Return the scenario of a file with this content, from a cache: reading it takes 10 ms.

    Raises `ScenarioError` with every problem.
    """
    scenario, problems = read(path, content)
    if problems or scenario is None:
        raise ScenarioError(
            "\n".join(map(str, problems)),
            hint=(
                f"vllm-repro check {shlex.quote(str(path))} lists these problems after each"
                " correction"
            ),
        )
    return scenario
