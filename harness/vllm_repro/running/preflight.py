"""Whether this machine is free for a night: GPUs that nobody uses, room on the disk, a server of the kind that is asked for.

What is found wrong is trouble of the host, and no statement about vLLM.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from vllm_repro.errors import InfraError
from vllm_repro.host.machine import gpus, nvidia_smi
from vllm_repro.servers.docker_engine import ENGINE_ERRORS, connect, explain
from vllm_repro.servers.kinds import ServerKind

__all__ = ["pull", "trouble"]

_GB = 10**9
_BUSY_MB = 1_024
"""Of a GPU's memory in use: its driver, and a screen, take some hundreds."""


def trouble(kind: ServerKind, out: Path, least_disk_gb: float) -> Iterator[str]:
    """A sentence for each thing that is wrong. out: where runs are written."""
    yield from _disk(out, least_disk_gb)
    if not kind.facts.on_gpus:
        return
    if not gpus():
        yield "no NVIDIA GPU: nvidia-smi is absent, fails, or lists none"
    yield from _busy_gpus()
    if kind.facts.container:
        yield from _docker()


def _disk(out: Path, least: float) -> Iterator[str]:
    folder = next(path for path in (out.resolve(), *out.resolve().parents) if path.exists())
    free = shutil.disk_usage(folder).free / _GB
    if free < least:
        yield f"{free:.1f} GB are free where runs are written, and a night wants {least:g} (--least-disk)"


def _busy_gpus() -> Iterator[str]:
    """Each GPU that somebody else uses."""
    try:
        found = nvidia_smi("index", "name", "memory.used")
    except InfraError as error:
        yield str(error)
        return
    for index, name, used in found:
        if used.isdigit() and int(used) > _BUSY_MB:
            yield f"GPU {index} ({name}) is busy: {int(used):,} MB of it are in use"


def pull(image: str) -> None:
    """Fetches what `image` names today. Raises `InfraError`."""
    with contextlib.closing(connect()) as engine:
        try:
            engine.client.images.pull(*image.rpartition(":")[::2])
        except ENGINE_ERRORS as error:
            raise explain(error, image) from error


def _docker() -> Iterator[str]:
    try:
        with contextlib.closing(connect()) as engine:
            if "nvidia" not in engine.runtimes:
                yield "the NVIDIA runtime is not registered with the container engine"
    except InfraError as error:
        yield error.told
