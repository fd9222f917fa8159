"""Counters in vLLM's source: how often statements run, without another line number.

REPRO_PROBE names a JSON file, {file of vLLM: [[line, probe], ...]}. A listed file is compiled
with a counter before the statement at each line; its text and bytecode on disk stay as they are.
Only the standard library is imported, so that this runs before vLLM is imported.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

_NAME = "__repro_probe__"

counts: Counter[int] = Counter()
"""How often each probe was passed."""


def register() -> None:
    """Compile the files that REPRO_PROBE lists with counters from now on; do nothing without it."""
    if name := os.environ.get("REPRO_PROBE"):
        listed = json.loads(Path(name).read_text(encoding="utf-8"))
        modules = {
            file.removesuffix(".py").removesuffix("/__init__").replace("/", "."): dict(lines)
            for file, lines in listed.items()
        }
        sys.meta_path.insert(0, _Finder(modules))


def take_counts() -> dict[int, int]:
    """Return how often each probe was passed since the last call, and clear the counts."""
    taken = dict(counts)
    counts.clear()
    return taken


class _Finder:
    """Import finder that loads the listed modules with counters."""

    def __init__(self, modules: Mapping[str, Mapping[int, int]]) -> None:
        self._modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a listed module with a loader of its own; None for others."""
        lines = self._modules.get(name)
        spec = PathFinder.find_spec(name, path, target) if lines is not None else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path, lines or {})
        return spec


class _Loader(SourceFileLoader):
    """Loader of a source file that puts counters before statements.

    probes: the number of the counter, by line.
    """

    def __init__(self, name: str, path: str, probes: Mapping[int, int]) -> None:
        super().__init__(name, path)
        self._probes = probes

    def get_code(self, fullname: str) -> CodeType:
        """Return the module's code with its counters, made from the source each time."""
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        _Counting(self._probes).visit(tree)
        code: CodeType = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
        return code

    def exec_module(self, module: ModuleType) -> None:
        """Run the module with the counters in its namespace."""
        module.__dict__[_NAME] = counts
        super().exec_module(module)


class _Counting(ast.NodeTransformer):
    """Change of a syntax tree: counters before statements. probes: as of `_Loader`."""

    def __init__(self, probes: Mapping[int, int]) -> None:
        self._probes = probes

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Put counters into the lists of statements of a node."""
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                setattr(node, name, [part for child in body for part in self._counted(child)])
        return node

    def _counted(self, statement: ast.AST) -> list[ast.AST]:
        """Return a list of the statement, with its counter before it if its line has one."""
        probe = self._probes.get(getattr(statement, "lineno", 0))
        future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if probe is None or future or not isinstance(statement, ast.stmt):
            return [statement]
        (count,) = ast.parse(f"{_NAME}[{probe}] += 1").body
        for node in ast.walk(count):
            ast.copy_location(node, statement)
        return [count, statement]
