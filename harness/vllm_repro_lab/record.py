"""What the lab replaces, and whether a release has it. Read from the sources, so that nothing is imported before its time."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Part", "Survey", "names_in", "survey", "write_once"]


@dataclass(frozen=True)
class Part:
    """One name of vLLM (or of torch) that the lab replaces, or that it calls where `effect` is empty.

    module: dotted. name: `function`, `Class` or `Class.method` in it. parameters: those that a stand-in reads by name.
    why: what keeps the original from running on a CPU. effect: what the replacement means for the bug. otherwise: what other releases
    have in its place, where it does the same. runs: whether the release's own lines run all the same; where not, to change them
    changes nothing in the lab. needed: whether the lab cannot do without it; where not, it is replaced in the releases that have it.
    """

    module: str
    name: str
    why: str = ""
    effect: str = ""
    parameters: tuple[str, ...] = ()
    otherwise: tuple[str, ...] = ()
    runs: bool = False
    needed: bool = True


@dataclass(frozen=True)
class Survey:
    """What a release has of the parts. missing: `module.name`, or with the parameter in parentheses."""

    replaced: tuple[Mapping[str, str], ...]
    missing: tuple[str, ...]

    def as_fields(self) -> dict[str, object]:
        found: dict[str, object] = {"replaced": list(self.replaced)}
        return found | ({"unsupported": list(self.missing)} if self.missing else {})


def survey(parts: Sequence[Part], source: Callable[[Part], tuple[str, Path] | None]) -> Survey:
    """Looks each part up. `source` says where its module lies: a short name for the report and the path, None for no such module."""
    known: dict[Path, tuple[dict[str, tuple[str, ...]], str]] = {}
    replaced: list[Mapping[str, str]] = []
    missing: list[str] = []
    for part in parts:
        place = source(part)
        if place is None and not part.needed:
            continue
        if place is None:
            missing.append(f"{part.module}.{part.name}")
            continue
        file, path = place
        if path not in known:
            content = path.read_bytes()
            known[path] = dict(names_in(content)), hashlib.sha256(content).hexdigest()
        names, digest = known[path]
        found = next((name for name in (part.name, *part.otherwise) if name in names), None)
        if found is None and not part.needed:
            continue
        if found is None:
            missing.append(" or ".join(f"{part.module}.{name}" for name in (part.name, *part.otherwise)))
            continue
        name = f"{part.module}.{found}"
        missing += [f"{name}({parameter})" for parameter in part.parameters if parameter not in names[found]]
        if part.effect:
            replaced.append({"name": name, "file": file, "sha256": digest, "why": part.why, "effect": part.effect})
    return Survey(tuple(replaced), tuple(missing))


def names_in(source: str | bytes) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The names that a module's top level defines, imports or assigns, and its classes' methods, each with its parameters."""
    yield from _names(ast.parse(source).body, "")


def _names(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name, args=arguments) | ast.AsyncFunctionDef(name=name, args=arguments):
                every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
                yield prefix + name, tuple(argument.arg for argument in every)
            case ast.ClassDef(name=name, body=inner):
                yield prefix + name, ()
                if not prefix:
                    yield from _names(inner, f"{name}.")
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((prefix + (alias.asname or alias.name), ()) for alias in aliases)
            case ast.Assign(targets=targets):
                yield from ((prefix + target.id, ()) for target in targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name, ()
            case ast.If(body=yes, orelse=no):
                yield from _names([*yes, *no], prefix)
            case ast.Try(body=tried, handlers=handlers):
                yield from _names([*tried, *(line for handler in handlers for line in handler.body)], prefix)


def write_once(path: Path, content: Mapping[str, object]) -> None:
    """Writes JSON whole or not at all: a reader never sees half of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
    Path(temporary).replace(path)
