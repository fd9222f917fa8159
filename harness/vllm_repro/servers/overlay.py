"""Patched vLLM for a server: an overlay on PYTHONPATH, or files mounted into a container.

In both cases a plugin in each of the server's processes reports the patched files that it imports
(`witness`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_repro.command.container import ContainerSpec, Mount
from vllm_repro.errors import InfraError
from vllm_repro.releases.disk import Progress, cache_root
from vllm_repro.releases.local_vllm import packages_of_local
from vllm_repro.releases.overlay import digests_of, make_overlay, patched_texts, write_files
from vllm_repro.scenario.patch import Patch
from vllm_repro.servers.docker_engine import connect
from vllm_repro.servers.docker_source import ImageSource, image_source
from vllm_repro.servers.witness import PLUGIN, witness_env

WITNESS_INSIDE = "/opt/vllm-repro/witness"
"""Where a container sees the plugin of `witness`."""
NOTHING = "/dev/null"
"""What is mounted over a compiled file: Python then compiles the patched source."""


@dataclass(frozen=True, kw_only=True)
class PatchedSource:
    """Variables, and mounts for a container, by which a server runs patched source of vLLM."""

    # sha256 of each patched file, by its name below the folder of packages
    digests: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    # the overlay, for PYTHONPATH; None for mounts, and without a patch
    folder: Path | None = None


def patch_packages(packages: Path, patches: Sequence[Patch], progress: Progress) -> PatchedSource:
    """Make a patched copy of the vLLM in `packages`; return the variables by which it is used.

    Raises `Unsupported` if a patch does not fit, and `InfraError` if the overlay cannot be written.
    """
    made = make_overlay(cache_root(), packages, patches, progress)
    env = witness_env(made.digests, str(made.folder), str(PLUGIN), os.environ.get("PYTHONPATH", ""))
    return PatchedSource(digests=made.digests, env=env, folder=made.folder)


def patch_installed(
    executable: Path, patches: Sequence[Patch], progress: Progress
) -> PatchedSource:
    """Make a patched copy of a `vllm` on PATH; return the variables by which it is used.

    Raises like `patch_packages`, and `InfraError` if its package is not found.
    """
    packages = packages_of_local(executable)
    if packages is None:
        raise InfraError(
            f"cannot patch {executable}: its Python does not find a package vllm",
            hint="--vllm names a release to install into the cache, which can be patched",
        )
    return patch_packages(packages, patches, progress)


def patch_container(
    spec: ContainerSpec, patches: Sequence[Patch], run: str, progress: Progress
) -> PatchedSource:
    """Patch vLLM's files of the image of `spec`; return the mounts that put them in its place.

    A container of it is started to read its files. Raises like `patch_packages`.

    run: id of the run, for the container's labels.
    """
    with contextlib.closing(connect()) as engine:
        source = image_source(engine, spec, sorted({patch.file for patch in patches}), run)
    return patch_image(source, patches, progress)


def patch_image(source: ImageSource, patches: Sequence[Patch], progress: Progress) -> PatchedSource:
    """Write patched copies of an image's files; return the mounts that put them in their place.

    Raises like `patch_packages`.
    """
    texts = patched_texts(
        patches, lambda file: source.files[file].text if file in source.files else None
    )
    folder = write_files(cache_root(), texts, progress)
    mounts = [Mount(str(PLUGIN), WITNESS_INSIDE, readonly=True)]
    for file in texts:
        original = source.files[file]
        mounts.append(Mount(str(folder / file), original.path, readonly=True))
        if original.compiled:
            # Python would run an unchecked .pyc instead of the patched source. It ignores an empty
            # one.
            mounts.append(Mount(NOTHING, original.compiled, readonly=True))
    return PatchedSource(
        digests=digests_of(texts),
        env=witness_env(texts, WITNESS_INSIDE, source.pythonpath),
        mounts=tuple(mounts),
    )
