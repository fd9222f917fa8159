"""Check of a release for the names that the lab replaces.

It reads the source files, because importing them here would be too early.

Also the log lines of what the lab observes in the engine.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_logger = logging.getLogger("vllm.repro_lab")
"""Child of vLLM's logger, so that its lines look like vLLM's own."""


@dataclass(frozen=True)
class Part:
    """One name of vLLM or torch that the lab replaces or, without `effect`, only calls."""

    # dotted
    module: str
    # `function`, `Class` or `Class.method` in the module
    name: str
    # why the original cannot run on a CPU
    why: str = ""
    # effect of the replacement on the bug
    effect: str = ""
    # those that the replacement reads by name
    parameters: tuple[str, ...] = ()
    # equivalent names in other releases
    otherwise: tuple[str, ...] = ()
    # the release's own lines still run; if not, a patch of them has no effect here
    runs: bool = False
    # a release without the name is unsupported; else it is replaced where it exists
    needed: bool = True


@dataclass(frozen=True)
class Survey:
    """Names that the lab replaces: those that a vLLM release has, and those that it lacks."""

    # name, file, SHA-256 of the file, why and effect of each
    replaced: tuple[Mapping[str, str], ...]
    # `module.name`, with a missing parameter in parentheses
    missing: tuple[str, ...]

    def as_fields(self) -> dict[str, object]:
        """Return the survey as fields of the JSON file that REPRO_LAB_FACTS names."""
        fields: dict[str, object] = {"replaced": list(self.replaced)}
        return fields | ({"unsupported": list(self.missing)} if self.missing else {})


def survey(parts: Sequence[Part], source: Callable[[Part], tuple[str, Path] | None]) -> Survey:
    """Look up each part in the files of a release; return those that it has and those it lacks.

    source: returns the file of its module, (short name for the report, path), or None.
    """
    replaced: list[Mapping[str, str]] = []
    missing: list[str] = []
    for part in parts:
        file, path = source(part) or ("", None)
        names, digest = _read(path) if path else ({}, "")
        present = next((name for name in (part.name, *part.otherwise) if name in names), None)
        if present is None:
            if part.needed:
                missing.append(
                    " or ".join(f"{part.module}.{name}" for name in (part.name, *part.otherwise))
                )
            continue
        name = f"{part.module}.{present}"
        missing += [
            f"{name}({parameter})"
            for parameter in part.parameters
            if parameter not in names[present]
        ]
        if part.effect:
            replaced.append(
                {
                    "name": name,
                    "file": file,
                    "sha256": digest,
                    "why": part.why,
                    "effect": part.effect,
                }
            )
    return Survey(tuple(replaced), tuple(missing))


@cache
def _read(path: Path) -> tuple[dict[str, tuple[str, ...]], str]:
    """Return the names in a source file, with their parameters, and the file's SHA-256; cached."""
    content = path.read_bytes()
    return dict(names_in(content)), hashlib.sha256(content).hexdigest()


def names_in(source: str | bytes) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield a module's top-level names and its classes' members, with their parameters."""
    yield from _names(ast.parse(source).body, "")


def _names(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the names that statements define, after `prefix`, with their parameters."""
    for statement in body:
        match statement:
            case (
                ast.FunctionDef(name=name, args=arguments)
                | ast.AsyncFunctionDef(name=name, args=arguments)
            ):
                every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                yield prefix + name, tuple(argument.arg for argument in every)
            case ast.ClassDef(name=name, body=inner):
                yield prefix + name, ()
                if not prefix:
                    yield from _names(inner, f"{name}.")
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((prefix + (alias.asname or alias.name), ()) for alias in aliases)
            case ast.Assign(targets=targets):
                yield from (
                    (prefix + target.id, ()) for target in targets if isinstance(target, ast.Name)
                )
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name, ()
            case ast.If(body=yes, orelse=no):
                yield from _names([*yes, *no], prefix)
            case ast.Try(body=tried, handlers=handlers):
                yield from _names(
                    [*tried, *(line for handler in handlers for line in handler.body)], prefix
                )


def observe(kind: str, **values: object) -> None:
    """Log an observation (`LAB observed KIND {…}`), which the conditions of triggers read.

    `vllm_repro_diagnosis.boot_facts.Observation` reads it.
    """
    _logger.info("LAB observed %s %s", kind, json.dumps(values))


def write_atomically(path: Path, content: Mapping[str, object]) -> None:
    """Write JSON atomically, so that a reader never sees an incomplete file."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
    Path(temporary).replace(path)
