"""A cache of real vLLM releases that run on this machine's CPU, filled on first use.

    <cache>/releases/0.28.0/                    one unpacked wheel with a launcher, bin/vllm
    <cache>/deps/torch-2.13.0-py3.11-<hash>/    a virtual environment shared by all releases that it satisfies
    <cache>/wheels/ tools/ tmp/ lock            downloads, our own pip, temporary files, who installs now
    <cache>/models/                             tiny models that callers make here (`tinymodel`)
    <cache>/patched/                            releases with a few files changed (`overlay`)

A second release of the same torch costs its wheel and no more: the launcher puts the release on PYTHONPATH
before the shared environment. Where the environment does not satisfy a release a second one is made; a
finished one never changes, because servers may be running from it. Everything is made under a temporary name
and renamed when complete, so a folder with `complete.json` is whole whatever killed the install, and one
without is removed by the next. One install runs at a time per cache.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from vllm_repro.errors import InfraError
from vllm_repro.releases.cachefiles import becoming, locked, processes_using, read_marker, remove_partial, write_marker
from vllm_repro.releases.knowledge import (
    WheelFacts,
    dependencies,
    dependencies_name,
    expected_size,
    human_size,
    release_version,
    torch_group,
    unmet,
)
from vllm_repro.releases.pip_install import Installer, PipInstaller, Progress, folder_size
from vllm_repro.releases.release_files import finish_release, installed, move_scripts, wheel_facts


@dataclass(frozen=True)
class Provisioned:
    """How to run one release: `[*argv_prefix, "serve", MODEL, ...]`, from any folder and with any
    environment.

    python: the interpreter that has its dependencies. pythonpath: the folder that holds the `vllm` package,
    for reading its sources or for running `python` with it. The launcher keeps what PYTHONPATH holds already,
    after the release.
    """

    version: str
    torch: str
    python: Path
    pythonpath: Path
    argv_prefix: tuple[str, ...]


@dataclass(frozen=True)
class CachedRelease:
    """A release in the cache. Sizes in bytes; the dependency set is shared, so its size counts once for all
    releases that name it.
    """

    version: str
    torch: str
    path: Path
    size: int
    dependencies: Path
    dependencies_size: int


def cache_root(environment: Mapping[str, str] | None = None) -> Path:
    """`$VLLM_REPRO_CACHE`, else `$XDG_CACHE_HOME/vllm-repro`, else `~/.cache/vllm-repro`; always absolute."""
    env = os.environ if environment is None else environment
    if own := env.get("VLLM_REPRO_CACHE"):
        return Path(own).expanduser().absolute()
    if (shared := env.get("XDG_CACHE_HOME")) and Path(
        shared
    ).is_absolute():  # the XDG specification: ignore a relative one
        return Path(shared) / "vllm-repro"
    return Path.home() / ".cache" / "vllm-repro"


class ReleaseCache:
    """The cache at `root`. Making the object touches nothing; only `provision` and `remove_all` write."""

    def __init__(
        self,
        root: Path | None = None,
        *,
        installer: Installer | None = None,
        free_bytes: Callable[[Path], int] | None = None,
    ) -> None:
        self.root = cache_root() if root is None else root.absolute()
        self._releases = self.root / "releases"
        self._deps = self.root / "deps"
        self._wheels = self.root / "wheels"
        self._scratch = self.root / "tmp"
        self._installer: Installer = installer or PipInstaller(self.root / "tools", self._scratch)
        self._free_bytes = free_bytes or (lambda path: shutil.disk_usage(path).free)

    def get(self, version: str) -> Provisioned | None:
        """The release if it is there and whole; never installs."""
        version = release_version(version)
        folder = self._releases / version
        facts = read_marker(folder)
        if facts is None:
            return None
        deps = self._deps / str(facts["dependencies"])
        python = deps / "bin" / "python"
        if read_marker(deps) is None or not python.exists():
            return None
        return Provisioned(version, str(facts["torch"]), python, folder, (str(folder / "bin" / "vllm"),))

    def provision(self, version: str, progress: Progress = print) -> Provisioned:
        """The release, installed if need be: minutes and gigabytes the first time, which `progress` says
        first.

        Raises `UsageError` for something that is no release number and `InfraError` for everything that goes
        wrong; then nothing half-made is left.
        """
        version = release_version(version)
        if ready := self.get(version):
            return ready
        with locked(self.root, f"installing vLLM {version}", progress):
            if ready := self.get(version):
                return ready
            self._remove_leftovers()
            try:
                return self._install(version, progress)
            except OSError as error:
                raise InfraError(
                    f"cannot install vLLM {version}: {error}", hint=f"The cache is at {self.root}."
                ) from error
            finally:
                self._remove_leftovers()

    def cached(self) -> list[CachedRelease]:
        """What is in the cache, oldest release first."""
        found = []
        for folder in self._releases.glob("*"):
            facts = read_marker(folder)
            if facts is None:
                continue
            deps = self._deps / str(facts["dependencies"])
            deps_size = int((read_marker(deps) or {"size": 0})["size"])
            found.append(CachedRelease(folder.name, str(facts["torch"]), folder, int(facts["size"]), deps, deps_size))
        return sorted(found, key=lambda release: [int(part) for part in release.version.split(".") if part.isdigit()])

    def size(self) -> int:
        """Bytes that `remove_all` would free: everything of ours on disk, leftovers included."""
        return sum(folder_size(folder) for folder in self._folders())

    def remove_all(self, progress: Progress = print) -> int:
        """Empties the cache and returns the bytes freed. Raises `InfraError` while a process runs from it."""
        if not self.root.exists():
            return 0
        with locked(self.root, "removing the cached releases", progress):
            if pids := processes_using(self.root):
                raise InfraError(
                    f"a cached vLLM is running (pid {', '.join(map(str, pids))})",
                    hint="Stop it first; `vllm-repro clean` ends servers that a killed run left.",
                )
            before = self.size()
            for folder in self._folders():
                shutil.rmtree(folder, ignore_errors=True)
            left = self.size()
            (self.root / "lock").unlink(missing_ok=True)
        if left:
            raise InfraError(
                f"{human_size(left)} under {self.root} could not be removed", hint="See who owns the files there."
            )
        if not any(self.root.iterdir()):  # the folder may be the user's own, with other things in it
            self.root.rmdir()
        return before

    def _folders(self) -> tuple[Path, ...]:
        others = (self.root / name for name in ("wheels", "tmp", "tools", "models", "patched"))
        return (self._releases, self._deps, *others)

    def _install(self, version: str, progress: Progress) -> Provisioned:
        started = time.monotonic()
        expected = expected_size(torch_group(version), dependencies_cached=self._likely_cached(version))
        progress(
            f"vLLM {version} is not in the cache: installing about {human_size(expected.disk)} "
            f"({human_size(expected.download)} to download) into {self.root}"
        )
        self._check_room(expected.disk + expected.download)
        progress(f"fetching the wheel of vLLM {version}")
        wheel = self._installer.download_wheel(version, self._wheels, progress)
        facts = wheel_facts(wheel, version)
        deps = self._dependencies(facts, progress)
        progress(f"unpacking vLLM {version}")
        with becoming(self._releases / version) as folder:
            self._installer.unpack(wheel, folder, progress)
            finish_release(folder, version, deps / "bin" / "python")
            write_marker(folder, version=version, torch=facts.torch, dependencies=deps.name, seconds=_since(started))
        wheel.unlink(missing_ok=True)  # only a download that was cut off is worth keeping
        ready = self.get(version)
        if ready is None:
            raise InfraError(f"vLLM {version} vanished from {self.root} while it was installed", hint="Run it again.")
        progress(f"vLLM {version} is ready after {_since(started):.0f} s")
        return ready

    def _dependencies(self, facts: WheelFacts, progress: Progress) -> Path:
        """A dependency set that satisfies the release: one that is there, or a new one."""
        if facts.torch is None:
            raise InfraError(
                f"the wheel of vLLM {facts.version} does not say which torch it was built for",
                hint="Releases from 0.19.0 do.",
            )
        wanted = dependencies(facts)
        for deps in self._dependency_sets(facts.torch):
            missing = unmet(wanted, installed(deps))
            if not missing:
                progress(f"its dependencies are those of {deps.name}, already here")
                return deps
            progress(f"{deps.name} lacks {', '.join(missing[:4])}{' and more' if len(missing) > 4 else ''}")
        deps = self._deps / dependencies_name(facts.torch, python_tag(), wanted)
        self._check_room(expected_size(facts.torch, dependencies_cached=False).disk)
        progress(
            f"installing torch {facts.torch} and {len(wanted)} dependencies, "
            "which releases with the same torch will share"
        )
        started = time.monotonic()
        with becoming(deps) as folder:
            self._installer.make_environment(folder, facts.torch, [str(item) for item in wanted], progress)
            missing = unmet((*wanted, Requirement(f"torch=={facts.torch}")), installed(folder))
            if missing:
                raise InfraError(
                    f"pip ended without installing {', '.join(missing)}",
                    hint="Run it again with pip's own output at hand.",
                )
            move_scripts(folder, deps)
            write_marker(folder, torch=facts.torch, python=python_tag(), seconds=_since(started))
        return deps

    def _dependency_sets(self, torch: str) -> list[Path]:
        return [
            deps
            for deps in sorted(self._deps.glob(f"torch-{torch}-{python_tag()}-*"))
            if read_marker(deps) is not None and (deps / "bin" / "python").exists()
        ]

    def _likely_cached(self, version: str) -> bool:
        torch = torch_group(version)
        return torch is not None and bool(self._dependency_sets(torch))

    def _check_room(self, needed: int) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        free = self._free_bytes(self.root)
        if free < needed:
            raise InfraError(
                f"{self.root} has {human_size(free)} free and {human_size(needed)} are needed",
                hint="Free some space, or set VLLM_REPRO_CACHE to a folder on a larger disk.",
            )

    def _remove_leftovers(self) -> None:
        """What killed installs left. Only under the lock, so no living install's work is among it."""
        remove_partial(self._releases)
        remove_partial(self._deps)
        remove_partial(self.root / "patched")
        shutil.rmtree(self._scratch, ignore_errors=True)


def provision(version: str, progress: Progress = print) -> Provisioned:
    """`ReleaseCache().provision(...)`: the release from the user's own cache."""
    return ReleaseCache().provision(version, progress)


def cached() -> list[CachedRelease]:
    """`ReleaseCache().cached()`: for `doctor` and `clean --envs`."""
    return ReleaseCache().cached()


def remove_all(progress: Progress = print) -> int:
    """`ReleaseCache().remove_all()`: for `clean --envs --yes`; bytes freed."""
    return ReleaseCache().remove_all(progress)


def python_tag() -> str:
    """The interpreter that dependency sets are made with, which is the one that this package runs on:
    "py3.11".
    """
    return f"py{sys.version_info.major}.{sys.version_info.minor}"


def _since(started: float) -> float:
    return time.monotonic() - started
