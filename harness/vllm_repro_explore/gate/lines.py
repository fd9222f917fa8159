"""Statements that a change of a Python file touches, and the functions they are in. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A statement of a file: its first line, and the function or class that it is in."""

    file: str
    line: int
    # qualified name; empty at the top of the module
    function: str
    # it runs when its module is imported, not when a function is called
    at_import: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f" in {self.function}" if self.function else "")


def meaning(text: str) -> str:
    """Return the syntax tree of a source as text, without comments, docstrings and line numbers.

    Raise `SyntaxError` for a text that is no Python.
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_docstring(body[0]):
            node.body = body[1:]  # type: ignore[attr-defined]  # it was found there
    return ast.dump(tree)


def changed_places(file: str, before: str, after: str) -> tuple[list[Place], list[Place]]:
    """Return the statements that a change of a file touches: those of before, those of after.

    Where lines are only added or removed, the other side has the statement that follows them.
    """
    old, new = before.splitlines(), after.splitlines()
    old_lines: set[int] = set()
    new_lines: set[int] = set()
    matcher = SequenceMatcher(None, _stripped(old), _stripped(new), autojunk=False)
    for tag, old_first, old_last, new_first, new_last in matcher.get_opcodes():
        if tag == "equal":
            continue
        old_lines.update(range(old_first + 1, max(old_last, old_first + 1) + 1))
        new_lines.update(range(new_first + 1, max(new_last, new_first + 1) + 1))
    return places_at(file, before, old_lines), places_at(file, after, new_lines)


def _stripped(lines: Sequence[str]) -> list[str]:
    """Return lines without blanks at their ends; indentation counts."""
    return [line.rstrip() for line in lines]


def places_at(file: str, text: str, lines: set[int]) -> list[Place]:
    """Return the innermost statement at each of the lines, in order, without repetition."""
    statements = sorted(
        _statements(ast.parse(text).body, "", True), key=lambda span: (span[0], -span[1])
    )
    innermost: dict[int, Place] = {}
    for first, last, line, function, at_import in statements:
        place = Place(file=file, line=line, function=function, at_import=at_import)
        innermost |= {number: place for number in range(first, last + 1) if number in lines}
    return sorted(set(innermost.values()), key=lambda place: place.line)


def function_places(file: str, text: str) -> list[Place]:
    """Return the first statement of each function of a file."""
    return [
        Place(file=file, line=line, function=name, at_import=False)
        for name, line in _functions(ast.parse(text).body, "")
    ]


def _functions(body: Sequence[ast.stmt], outer: str) -> Iterator[tuple[str, int]]:
    """Yield (qualified name, line of the first statement) of each function."""
    for node in body:
        if isinstance(node, _SCOPES):
            name = f"{outer}.{node.name}" if outer else node.name
            statements = node.body[_is_docstring(node.body[0]) :] or node.body
            if not isinstance(node, ast.ClassDef):
                yield name, statements[0].lineno
            yield from _functions(node.body, name)
        else:
            for part in _parts(node):
                yield from _functions(part, outer)


def _statements(
    body: Sequence[ast.stmt], function: str, at_import: bool
) -> Iterator[tuple[int, int, int, str, bool]]:
    """Yield (first line, last line, line to count at, function, at import) of each statement.

    A compound statement is counted at its head, a function at its first statement.
    """
    for node in body:
        if _is_docstring(node):
            continue
        last = node.end_lineno or node.lineno
        if isinstance(node, _SCOPES):
            name = f"{function}.{node.name}" if function else node.name
            inner_import = at_import and isinstance(node, ast.ClassDef)
            inner = [part for part in node.body if not _is_docstring(part)] or node.body
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield first, last, inner[0].lineno, name, inner_import
            yield from _statements(node.body, name, inner_import)
            continue
        yield node.lineno, last, node.lineno, function, at_import
        for part in _parts(node):
            if part:
                yield from _statements(part, function, at_import)
        for handler in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            first = getattr(handler, "lineno", handler.body[0].lineno)
            yield first, first, handler.body[0].lineno, function, at_import


def _parts(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements inside a compound statement."""
    for name in ("body", "orelse", "finalbody"):
        part = getattr(node, name, None)
        if isinstance(part, list):
            yield part
    for branch in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield branch.body


def _is_docstring(node: ast.stmt) -> bool:
    """Return True for a lone string."""
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
