"""What this machine is: operating system, Python, GPUs. Everything is read, nothing is guessed."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass

import psutil

from vllm_repro.errors import InfraError

__all__ = ["Gpu", "Machine", "gpus", "look", "memory_gb", "nvidia_smi"]


@dataclass(frozen=True)
class Gpu:
    """One GPU. memory_gb in GB of 2**30 bytes; capability as CUDA counts it, for example 9.0."""

    name: str
    memory_gb: float
    capability: float | None
    driver: str


@dataclass(frozen=True)
class Machine:
    os: str
    python: str
    cpus: int
    memory_gb: float
    gpus: tuple[Gpu, ...]

    @property
    def driver(self) -> str | None:
        return self.gpus[0].driver if self.gpus else None


def nvidia_smi(*fields: str) -> list[list[str]]:
    """What `nvidia-smi` says of each GPU, a text for each field; nothing where it is absent or fails. Raises `InfraError` where it does
    not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InfraError(f"nvidia-smi does not answer: {type(error).__name__}", hint="look at the driver") from error
    lines = [line.split(",") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    # A warning among them has another number of commas.
    return [[field.strip() for field in line] for line in lines if len(line) == len(fields)]


def gpus() -> tuple[Gpu, ...]:
    """NVIDIA GPUs by `nvidia-smi`; none where it is absent, fails or does not answer."""
    try:
        found = nvidia_smi("name", "memory.total", "compute_cap", "driver_version")
    except InfraError:
        return ()
    return tuple(
        Gpu(name, round((_number(memory) or 0) / 1024, 1), _number(capability), driver)
        for name, memory, capability, driver in found
    )


def memory_gb() -> float:
    """The host's memory in GB of 2**30 bytes."""
    return round(psutil.virtual_memory().total / 2**30, 1)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def look() -> Machine:
    """This machine, now."""
    return Machine(
        f"{platform.system()} {platform.release()} {platform.machine()}",
        platform.python_version(),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gb(),
        gpus(),
    )
