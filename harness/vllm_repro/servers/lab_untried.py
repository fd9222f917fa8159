"""Patched functions that do not run in the lab, because it replaces them. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from vllm_repro_lab.record import Part

__all__ = ["untried"]


def untried(parts: Sequence[Part], file: str, before: str, after: str) -> tuple[str, ...]:
    """Return the functions and classes of `file` that differ and that the lab replaces."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    names = dict.fromkeys(part.name for part in parts if part.module == module and not part.runs)
    old, new = dict(_definitions(before)), dict(_definitions(after))
    return tuple(name for name in names if old.get(name) != new.get(name))


def _definitions(source: str) -> Iterator[tuple[str, str]]:
    """Yield each function, class and method of a module, (name, normalized source); nothing for a syntax error."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, ast.unparse(node)
        if isinstance(node, ast.ClassDef):
            yield from (
                (f"{node.name}.{inner.name}", ast.unparse(inner))
                for inner in node.body
                if isinstance(inner, ast.FunctionDef)
            )
