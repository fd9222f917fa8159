"""A vLLM general plugin that changes nothing: it says in the server's log which changed files of vLLM's source its processes import.

vLLM loads it in each of its processes, by its entry point. It does nothing unless REPRO_PATCHED names files. It runs on vLLM's
interpreter, with the standard library alone.

    REPRO_PATCHED  files that were changed, below the folder that holds the package vllm and separated by colons

Each line has the hash of the file as this process finds it: `found` where it begins, `imported` once it runs the file's code, and `stale`
where what it runs was compiled from another text.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType

__all__ = ["register"]

_done = False


def register() -> None:
    """The entry point."""
    global _done
    files = [name for name in os.environ.get("REPRO_PATCHED", "").split(":") if name]
    if not files or _done:
        return
    _done = True
    vllm = find_spec("vllm")
    for name in files:
        for package in (vllm.submodule_search_locations if vllm else None) or ():
            path = Path(package).parent / name
            if path.is_file():
                _say("found", name, path.read_bytes())
    waiting = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in files}
    for module in waiting.keys() & sys.modules.keys():
        _say_imported(waiting.pop(module), sys.modules[module].__spec__)
    if waiting:
        sys.meta_path.insert(0, _Imports(waiting))


class _Imports:
    """Asked first for every module, and leaves all of them to the finders after it. files: by the module's name."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = dict(files)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if file := self._files.pop(name, None):
            _say_imported(file, PathFinder.find_spec(name, path, target))


def _say_imported(file: str, spec: ModuleSpec | None) -> None:
    """What the loader runs may come from a compiled file, so that code is held against the text's own, not the text alone."""
    get_source = getattr(spec.loader, "get_data", None) if spec else None
    get_code = getattr(spec.loader, "get_code", None) if spec else None
    if spec is None or spec.origin is None or get_source is None or get_code is None:
        return
    source: bytes = get_source(spec.origin)
    try:
        code: CodeType | None = get_code(spec.name)
        compiled = compile(source, spec.origin, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return  # the import is about to say so itself, from its own place
    _say("imported" if code == compiled else "stale", file, source)


def _say(kind: str, file: str, source: bytes) -> None:
    line = json.dumps({"file": file, "sha256": sha256(source).hexdigest(), "pid": os.getpid()})
    print(f"REPRO observed {kind} {line}", file=sys.stderr, flush=True)
