"""A vLLM whose source is changed for one arm: what a process or a container is given besides, so that it runs that and no other.

A release of the cache and a `vllm` on PATH come as a folder of links with the changed files among them. In a container the changed files
are mounted over the image's own. Either way a plugin of ours in each of the server's processes says what it found (`witness`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_repro.command.container import ContainerSpec, Mount
from vllm_repro.errors import InfraError
from vllm_repro.releases.localvllm import cached_version, packages_of_local
from vllm_repro.releases.overlay import changed_texts, digests_of, keep_changed, overlay, overlay_package
from vllm_repro.releases.pip_install import Progress
from vllm_repro.releases.provision import Provisioned, ReleaseCache, cache_root
from vllm_repro.scenario.patch import Patch
from vllm_repro.servers.docker_engine import connect
from vllm_repro.servers.docker_source import ImageSource, image_source
from vllm_repro.servers.witness import PLUGIN, witness_env

__all__ = ["Inside", "Laid", "over_container", "over_image", "over_installed", "over_release"]

WITNESS_INSIDE = "/opt/vllm-repro/witness"
NOTHING = "/dev/null"


@dataclass(frozen=True)
class Inside:
    """Where the changed files are in a container, {name: path}, and the command of a Python that runs in there."""

    python: str
    paths: Mapping[str, str]


@dataclass(frozen=True)
class Laid:
    """What a server needs to run the changed source.

    digests: sha256 of each changed file, by its name below the folder of packages. vllm: how to call it, of a process. env: variables to
    set. mounts, inside: of a container.
    """

    digests: Mapping[str, str] = field(default_factory=dict)
    vllm: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: tuple[Mount, ...] = ()
    inside: Inside | None = None


def over_release(release: Provisioned, patches: Sequence[Patch], progress: Progress) -> Laid:
    """A release of the cache. Raises `Unsupported` where a patch does not fit it, `InfraError` for a disk that cannot hold it."""
    made = overlay(cache_root(), release, patches, progress)
    return Laid(made.digests, made.release.argv_prefix, witness_env(made.digests, str(PLUGIN), _own_path()))


def over_installed(executable: Path, patches: Sequence[Patch], progress: Progress) -> Laid:
    """A `vllm` on PATH. Raises as `over_release`, and `InfraError` where its Python does not say where it is."""
    cached = cached_version(executable)
    release = ReleaseCache().get(cached) if cached else None
    if release is not None:
        return over_release(release, patches, progress)  # whose launcher puts it before everything on PYTHONPATH
    packages = packages_of_local(executable)
    if packages is None:
        raise InfraError(
            f"the Python of {executable} does not say where its vllm is, so nothing can be laid over it",
            hint="--vllm names a release to install into a cache, which takes a patch",
        )
    folder, digests = overlay_package(cache_root(), packages, patches, progress)
    return Laid(digests, (str(executable),), witness_env(digests, str(folder), str(PLUGIN), _own_path()))


def over_container(spec: ContainerSpec, patches: Sequence[Patch], run: str, progress: Progress) -> Laid:
    """The image of a container to be, whose own Python is asked for the files. run: id of the run. Raises as `over_release`."""
    with contextlib.closing(connect()) as engine:
        source = image_source(engine, spec, sorted({patch.file for patch in patches}), run)
    return over_image(source, patches, progress)


def over_image(source: ImageSource, patches: Sequence[Patch], progress: Progress) -> Laid:
    """An image, whose own files `source` holds. Raises as `over_release`."""
    texts = changed_texts(patches, lambda file: source.files[file].text if file in source.files else None)
    folder = keep_changed(cache_root(), texts, progress)
    mounts = [Mount(str(PLUGIN), WITNESS_INSIDE, readonly=True)]
    for file in texts:
        original = source.files[file]
        mounts.append(Mount(str(folder / file), original.path, readonly=True))
        if original.compiled:
            # Python takes a compiled file for the text that its header names: by time and size, by hash, or unasked. An empty one is
            # none, so that whatever the image's says, what is mounted is what is compiled and run.
            mounts.append(Mount(NOTHING, original.compiled, readonly=True))
    env = witness_env(texts, WITNESS_INSIDE, source.pythonpath)
    paths = {file: source.files[file].path for file in texts}
    return Laid(digests_of(texts), (), env, tuple(mounts), Inside(source.python, paths))


def _own_path() -> str:
    return os.environ.get("PYTHONPATH", "")
