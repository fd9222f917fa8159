"""vLLM general plugin that logs which patched files of vLLM's source a process imports.

It changes nothing. vLLM loads it in each of its processes, on vLLM's interpreter, so it imports
only the standard library. It does nothing unless REPRO_PATCHED is set.

    REPRO_PATCHED  the patched files, separated by colons, relative to the parent of package vllm

Each line has the hash of the file. `found`: the file exists at start. `imported`: the process runs
its code. `stale`: the process runs code that was compiled from a different text.
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

_done = False


def register() -> None:
    """Log the patched files that exist, and watch their imports; vLLM's entry point.

    Do nothing without `REPRO_PATCHED`, or if it was called before in this process.
    """
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
                _log("found", name, path.read_bytes())
    waiting = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in files
    }
    for module in waiting.keys() & sys.modules.keys():
        _log_import(waiting.pop(module), sys.modules[module].__spec__)
    if waiting:
        sys.meta_path.insert(0, _Imports(waiting))


class _Imports:
    """Import finder that logs imports of `files`, {module: file}.

    It leaves every import to the other finders.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = dict(files)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        """Log the import of a patched file, and leave the import itself to the other finders."""
        if file := self._files.pop(name, None):
            _log_import(file, PathFinder.find_spec(name, path, target))


def _log_import(file: str, spec: ModuleSpec | None) -> None:
    """Log that a process imports a patched file, or stale code in place of it.

    Compare the loaded code with the source: the loader may use a compiled file.
    """
    get_source = getattr(spec.loader, "get_data", None) if spec else None
    get_code = getattr(spec.loader, "get_code", None) if spec else None
    if spec is None or spec.origin is None or get_source is None or get_code is None:
        return
    source: bytes = get_source(spec.origin)
    try:
        code: CodeType | None = get_code(spec.name)
        compiled = compile(source, spec.origin, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return  # the import itself raises next, with its own traceback
    _log("imported" if code == compiled else "stale", file, source)


def _log(kind: str, file: str, source: bytes) -> None:
    """Print a line for the harness: what happened to a patched file, its hash, and the pid."""
    line = json.dumps({"file": file, "sha256": sha256(source).hexdigest(), "pid": os.getpid()})
    print(f"REPRO observed {kind} {line}", file=sys.stderr, flush=True)
