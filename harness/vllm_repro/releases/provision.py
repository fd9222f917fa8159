"""A cache of real vLLM releases that run on this machine's CPU, filled on first use.

    <cache>/releases/0.28.0/                    one unpacked wheel with a launcher, bin/vllm
    <cache>/deps/torch-2.13.0-py3.11-<hash>/    a virtual environment shared by all releases that it satisfies
    <cache>/torch/2.13.0-py3.11/                torch, shared by all of those (`layers`)
    <cache>/wheels/ tools/ tmp/ lock            downloads, our own pip, temporary files, who installs now
    <cache>/models/                             tiny models that callers make here (`tinymodel`)
    <cache>/patched/                            releases with a few files changed (`overlay`)

A second release of the same torch costs its wheel and, where its pins differ, the packages that differ: the launcher puts the
release on PYTHONPATH before the shared environments. Everything is made under a temporary name and renamed when complete, so a
folder with `complete.json` was whole, whatever killed the install, and one without is removed by the next. What was damaged
since is seen by the next `provision`, and made again. One install runs at a time per cache.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_repro.errors import InfraError
from vllm_repro.releases.cachefiles import (
    becoming,
    locked,
    processes_using,
    read_marker,
    remove_broken,
    revoke_marker,
    write_marker,
)
from vllm_repro.releases.footprint import Size
from vllm_repro.releases.knowledge import check_supported, human_size, release_version
from vllm_repro.releases.layers import Layer, Layers, damage_of
from vllm_repro.releases.pip_install import Installer, PipInstaller, Progress, folder_size
from vllm_repro.releases.records import damage
from vllm_repro.releases.release_files import finish_release, is_finished, wheel_facts


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
    """A release in the cache. Sizes in bytes, each for itself. The layers that it runs on are shared, so their sizes count once for
    all releases that name them: its dependency set, then what that stands on. Empty where one is not whole.
    """

    version: str
    torch: str
    path: Path
    size: int
    layers: tuple[Layer, ...]


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
        self._wheels = self.root / "wheels"
        self._scratch = self.root / "tmp"
        self._installer: Installer = installer or PipInstaller(self.root / "tools", self._scratch)
        self._free_bytes = free_bytes or (lambda path: shutil.disk_usage(path).free)
        self._layers = Layers(self.root, self._installer, self._announce)

    def get(self, version: str) -> Provisioned | None:
        """The release if it is there and whole; never installs."""
        version = release_version(version)
        folder = self._releases / version
        facts = read_marker(folder)
        if facts is None or not (layers := self._layers.of(str(facts.get("dependencies")))):
            return None
        return Provisioned(version, str(facts.get("torch")), layers[0].python, folder, (str(folder / "bin" / "vllm"),))

    def provision(self, version: str, progress: Progress = print) -> Provisioned:
        """The release, installed if need be: minutes and gigabytes the first time, which `progress` says
        first.

        Raises `UsageError` for something that is no release number and `InfraError` for everything that goes
        wrong; then nothing half-made is left.
        """
        version = release_version(version)
        if (ready := self.get(version)) and not self._damage(ready):
            return ready
        check_supported(version)
        with locked(self.root, f"installing vLLM {version}", progress):
            try:
                for _ in (
                    "what is there",
                    "what was made of it",
                ):  # an install may come upon a damaged layer in its turn
                    self._remove_leftovers()
                    ready = self.get(version) or self._install(version, progress)
                    if not (broken := self._damage(ready)):
                        return ready
                    self._give_up(broken, progress)
                self._remove_leftovers()
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
            layers = self._layers.of(str(facts.get("dependencies")))
            found.append(CachedRelease(folder.name, str(facts.get("torch")), folder, facts["size"], layers))
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
        return (self._releases, *self._layers.folders, *others)

    def _damage(self, ready: Provisioned) -> dict[Path, str]:
        """What was lost since it was made, of a release and of what it runs on: {folder: what is wrong}."""
        lost = damage(ready.pythonpath, sources=True) or (
            "" if is_finished(ready.pythonpath) else "its launcher is missing or empty"
        )
        layers = self._layers.of(ready.python.parent.parent.name)
        found = {ready.pythonpath: lost, **{layer.path: damage_of(layer.path) for layer in layers}}
        return {folder: what for folder, what in found.items() if what}

    def _install(self, version: str, progress: Progress) -> Provisioned:
        started = time.monotonic()
        self._announce(f"vLLM {version} is not in the cache", self._layers.expected(version), progress)
        progress(f"fetching the wheel of vLLM {version}")
        wheel = self._installer.download_wheel(version, self._wheels, progress)
        facts = wheel_facts(wheel, version)
        dependencies = self._layers.obtain(facts, progress)
        progress(f"unpacking vLLM {version}")
        with becoming(self._releases / version) as folder:
            self._installer.unpack(wheel, folder, progress)
            finish_release(folder, version, self._layers.python(dependencies))
            write_marker(folder, version=version, torch=facts.torch, dependencies=dependencies, seconds=_since(started))
        wheel.unlink(missing_ok=True)  # only a download that was cut off is worth keeping
        ready = self.get(version)
        if ready is None:
            raise InfraError(f"vLLM {version} vanished from {self.root} while it was installed", hint="Run it again.")
        progress(f"vLLM {version} is ready after {_since(started):.0f} s")
        return ready

    def _give_up(self, broken: Mapping[Path, str], progress: Progress) -> None:
        """Declares damaged folders no longer whole. Raises `InfraError` while a process runs from one of them."""
        for folder, what in broken.items():
            said = f"{folder.relative_to(self.root)} in the cache is damaged: {what}"
            if pids := processes_using(folder):
                raise InfraError(
                    f"{said}; a vLLM runs from it (pid {', '.join(map(str, pids))})",
                    hint="Stop it, and run this again.",
                )
            progress(f"{said}; making it again")
            revoke_marker(folder)

    def _announce(self, why: str, size: Size, progress: Progress) -> None:
        """Says what is about to be added. Raises `InfraError` where there is no room for it."""
        progress(f"{why}: installing {size} into {self.root}")
        self.root.mkdir(parents=True, exist_ok=True)
        free = self._free_bytes(self.root)
        if free < size.room:
            raise InfraError(
                f"{self.root} has {human_size(free)} free and {human_size(size.room)} are needed",
                hint="Free some space, or set VLLM_REPRO_CACHE to a folder on a larger disk.",
            )

    def _remove_leftovers(self) -> None:
        """What killed installs left, and what is no longer whole. Only under the lock, so no living install's work is among it."""
        for folder in (self._releases, *self._layers.folders, self.root / "patched"):
            remove_broken(folder)
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


def _since(started: float) -> float:
    return time.monotonic() - started
