"""What releases run on: layers of virtual environments, so that those of one torch share the gigabytes even where pins differ.

    <cache>/torch/2.11.0-py3.11/               torch and what it needs
    <cache>/deps/torch-2.11.0-py3.11-<hash>/   a dependency set: the rest of what a release asks for

A set sees the layers below it after its own packages. The first set for a torch stands on torch; a further one, for a release that
no set satisfies, stands on such a first one and holds only what differs. A set that an older version of this package made holds
its torch itself, and does for a first one. A finished layer never changes, because servers may be running from it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from vllm_repro.errors import InfraError
from vllm_repro.releases.cachefiles import becoming, read_marker, write_marker
from vllm_repro.releases.footprint import Size, base_size, further_set_size, release_size, set_size
from vllm_repro.releases.knowledge import (
    WheelFacts,
    dependencies,
    dependencies_name,
    torch_group,
    unmet,
)
from vllm_repro.releases.pip_install import Installer, Progress
from vllm_repro.releases.records import count_distributions, damage
from vllm_repro.releases.release_files import installed, move_scripts, packages_of, stands_on

__all__ = ["Layer", "Layers", "damage_of"]


@dataclass(frozen=True)
class Layer:
    """One environment in the cache. Size in bytes."""

    path: Path
    size: int

    @property
    def python(self) -> Path:
        return _python(self.path)


class Layers:
    """The layers of the cache at `root`. Only `obtain` writes, and only the holder of the cache's lock may call it.

    announce: told what is about to be made and how much it adds, before each; it raises where there is no room.
    """

    def __init__(self, root: Path, installer: Installer, announce: Callable[[str, Size, Progress], None]) -> None:
        self.folders = (root / "torch", root / "deps")
        self._bases, self._sets = self.folders
        self._installer = installer
        self._announce = announce

    def of(self, name: str) -> tuple[Layer, ...]:
        """The layers of a set, its own first; empty where one of them is not whole."""
        environment = self._sets / name
        found: list[Layer] = []
        for folder in (environment, *stands_on(environment)):
            facts = read_marker(folder)
            if facts is None or not _python(folder).exists():
                return ()
            found.append(Layer(folder, facts["size"]))
            if folder == environment and facts.get("layers", 0) != len(stands_on(environment)):
                return ()
        return tuple(found)

    def python(self, name: str) -> Path:
        """The interpreter of a set."""
        return _python(self._sets / name)

    def expected(self, version: str) -> Size:
        """What an install of this release will take, as far as can be told before its wheel is there to ask."""
        torch = torch_group(version)
        if torch is not None and self._of_torch(torch):
            return release_size()
        return release_size() + self._first_set(torch)

    def obtain(self, facts: WheelFacts, progress: Progress) -> str:
        """The name of a set that satisfies the release: one that is there, or a new one. Raises `InfraError`."""
        if facts.torch is None:
            raise InfraError(
                f"the wheel of vLLM {facts.version} does not say which torch it was built for",
                hint="Releases from 0.19.0 do.",
            )
        wanted = dependencies(facts)
        lacking: dict[str, tuple[str, ...]] = {}
        for layers in self._of_torch(facts.torch):
            name = layers[0].path.name
            lacking[name] = unmet(wanted, installed(layers[0].path))
            if not lacking[name]:
                progress(f"its dependencies are those of {name}, already here")
                return name
        firsts = [name for name in lacking if not self._is_further(name)]
        name = dependencies_name(facts.torch, _python_tag(), wanted)
        if firsts:
            nearest = min(firsts, key=lambda first: len(lacking[first]))
            missing = ", ".join(item.partition(";")[0].strip() for item in lacking[nearest])
            self._announce(f"{nearest} lacks {missing}", further_set_size(), progress)
            below = [layer.path for layer in self.of(nearest)]
        else:
            added = self._first_set(facts.torch)
            if (release_size() + added).disk > self.expected(facts.version).disk:  # more than was said before
                self._announce(f"vLLM {facts.version} is built for torch {facts.torch}", added, progress)
            below = [self._base(facts.torch, progress)]
        if not self.of(name):  # it may have lacked nothing but what it stands on
            self._make_set(name, below, facts.torch, wanted, progress)
        return name

    def _base(self, torch: str, progress: Progress) -> Path:
        base = self._base_path(torch)
        if self._has_base(torch):
            progress(f"torch {torch} is already here")
            return base
        progress(f"installing torch {torch}, once for all releases that are built for it")
        started = time.monotonic()
        with becoming(base) as folder:
            self._installer.make_base(folder, torch, progress)
            _complete(folder, base, (Requirement(f"torch=={torch}"),), torch, started)
        return base

    def _make_set(
        self, name: str, below: Sequence[Path], torch: str, wanted: tuple[Requirement, ...], progress: Progress
    ) -> None:
        progress(f"installing what is missing of {len(wanted)} dependencies, for all releases that can do with them")
        started = time.monotonic()
        with becoming(self._sets / name) as folder:
            self._installer.make_environment(folder, below, torch, [str(item) for item in wanted], progress)
            _complete(folder, self._sets / name, (*wanted, Requirement(f"torch=={torch}")), torch, started)

    def _is_further(self, name: str) -> bool:
        """Whether a set stands on another one."""
        return any(folder.parent == self._sets for folder in stands_on(self._sets / name))

    def _of_torch(self, torch: str) -> list[tuple[Layer, ...]]:
        names = sorted(path.name for path in self._sets.glob(f"torch-{torch}-{_python_tag()}-*"))
        return [layers for name in names if (layers := self.of(name))]

    def _base_path(self, torch: str) -> Path:
        return self._bases / f"{torch}-{_python_tag()}"

    def _first_set(self, torch: str | None) -> Size:
        """What the first set for a torch takes."""
        has_base = torch is not None and self._has_base(torch)
        return set_size(torch) if has_base else set_size(torch) + base_size(torch)

    def _has_base(self, torch: str) -> bool:
        base = self._base_path(torch)
        return read_marker(base) is not None and _python(base).exists()


def damage_of(environment: Path) -> str:
    """What is wrong with a layer that is marked as whole, as `records.damage` says it; empty where that cannot be told."""
    counted = (read_marker(environment) or {}).get("distributions")
    return damage(packages_of(environment), counted) if isinstance(counted, int) else ""


def _python_tag() -> str:
    """The interpreter that the layers are made with, which is the one that this package runs on: "py3.11"."""
    return f"py{sys.version_info.major}.{sys.version_info.minor}"


def _complete(folder: Path, final: Path, wanted: tuple[Requirement, ...], torch: str, started: float) -> None:
    """Declares an environment whole that is about to be renamed to `final`. Raises `InfraError` where it lacks something."""
    if missing := unmet(wanted, installed(folder)):
        raise InfraError(
            f"pip ended without installing {', '.join(missing)}",
            hint="Run it again with pip's own output at hand.",
        )
    move_scripts(folder, final)
    write_marker(
        folder,
        torch=torch,
        layers=len(stands_on(folder)),
        python=_python_tag(),
        distributions=count_distributions(packages_of(folder)),
        seconds=time.monotonic() - started,
    )


def _python(environment: Path) -> Path:
    return environment / "bin" / "python"
