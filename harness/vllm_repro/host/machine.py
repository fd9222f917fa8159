"""Facts about this machine: operating system, Python, memory, GPUs."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from vllm_repro.errors import InfraError


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One NVIDIA GPU: its name, memory, compute capability and driver."""

    name: str
    # in GB of 2**30 bytes
    memory_gb: float
    # CUDA compute capability, such as 9.0
    capability: float | None
    driver: str


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """Worst memory, heat, power and clock of some GPUs over a time; None: unknown."""

    # most memory in use on one GPU, in MiB
    memory_mib: float | None
    # highest temperature of one GPU, in °C
    temperature_c: float | None
    # most power of one GPU, in W
    power_w: float | None
    # lowest clock of one GPU, in MHz
    clock_mhz: float | None
    # the hardware slowed one GPU down, for heat or power
    slowed: bool


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a run, for its journal."""

    os: str
    python: str
    # CPUs that this process may use
    cpus: int
    # in GB of 2**30 bytes
    memory_gb: float
    gpus: tuple[Gpu, ...]

    @property
    def driver(self) -> str | None:
        """Return the version of the NVIDIA driver; None without a GPU."""
        return self.gpus[0].driver if self.gpus else None


_NO_DEVICES = 6
_PATIENCE_S = 30.0
_failed: list[InfraError] = []
"""The last failure of `nvidia-smi`. After a hang it is not called again: each call takes 30 s."""


def nvidia_smi(*fields: str) -> list[list[str]]:
    """Return a list of `fields` for each GPU, as `nvidia-smi` prints them; none if it is absent.

    fields: as for `--query-gpu`. Raises `InfraError` if it fails or does not answer in 30 s. After
    such a hang it raises at once, until `forget_failure`.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    if _failed and isinstance(_failed[0].__cause__, subprocess.TimeoutExpired):
        raise _failed[0]
    forget_failure()
    query = [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
        )
        if done.returncode not in (0, _NO_DEVICES):
            output = (
                " ".join((done.stdout + done.stderr).split()) or f"exit status {done.returncode}"
            )
            raise OSError(output)
    except (OSError, subprocess.TimeoutExpired) as error:
        what = (
            f"did not answer in {_PATIENCE_S:g} s"
            if isinstance(error, subprocess.TimeoutExpired)
            else f"fails: {error}"
        )
        _failed.append(
            InfraError(
                f"nvidia-smi {what}",
                hint="run it by hand; the driver may need a reload or a reboot",
            )
        )
        raise _failed[0] from error
    lines = [line.split(",") for line in done.stdout.splitlines()]
    # Skip warnings among the lines.
    return [[field.strip() for field in line] for line in lines if len(line) == len(fields)]


def forget_failure() -> None:
    """Allow calls of `nvidia-smi` again after a hang."""
    _failed.clear()


def gpu_trouble() -> str:
    """Return how the last call of `nvidia-smi` failed; empty if it did not."""
    return f"{_failed[0]}" if _failed else ""


def gpus() -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs; none if `nvidia-smi` is absent, fails or hangs (`gpu_trouble`)."""
    try:
        rows = nvidia_smi("name", "memory.total", "compute_cap", "driver_version")
    except InfraError:
        return ()
    return tuple(
        Gpu(
            name=name,
            memory_gb=round((_number(memory) or 0) / 1024, 1),
            capability=_number(capability),
            driver=driver,
        )
        for name, memory, capability, driver in rows
    )


def cpu_flags() -> frozenset[str]:
    """Return an x86 processor's flags in /proc/cpuinfo, such as "avx512_bf16"; empty on others."""
    return frozenset(
        word
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("flags")
        for word in line.split()
    )


def memory_gb() -> float:
    """Return the host's memory in GB of 2**30 bytes."""
    return round(psutil.virtual_memory().total / 2**30, 1)


def gpu_use(cards: Sequence[str]) -> GpuUse | None:
    """Return the worst memory, heat, power and clock now, each over all of these GPUs.

    cards: their indices. None if `nvidia-smi` shows none of them. Raises `InfraError` if it fails.
    """
    fields = ("memory.used", "temperature.gpu", "power.draw", "clocks.sm")
    return worst_use(
        [
            GpuUse(
                memory_mib=_number(memory),
                temperature_c=_number(heat),
                power_w=_number(power),
                clock_mhz=_number(clock),
                slowed=slow == "Active",
            )
            for index, slow, memory, heat, power, clock in nvidia_smi(
                "index", "clocks_throttle_reasons.hw_slowdown", *fields
            )
            if index in cards
        ]
    )


def worst_use(uses: Sequence[GpuUse]) -> GpuUse | None:
    """Return the worst value of each field of `uses`; None if there are none."""

    def known(field: str) -> list[float]:
        return [value for use in uses if (value := getattr(use, field)) is not None]

    if not uses:
        return None
    return GpuUse(
        memory_mib=max(known("memory_mib"), default=None),
        temperature_c=max(known("temperature_c"), default=None),
        power_w=max(known("power_w"), default=None),
        clock_mhz=min(known("clock_mhz"), default=None),
        slowed=any(use.slowed for use in uses),
    )


def _number(text: str) -> float | None:
    """Return a number that `nvidia-smi` printed; None if it printed none, such as `[N/A]`."""
    try:
        return float(text)
    except ValueError:
        return None


def look() -> Machine:
    """Return this machine's system, Python, CPUs, memory and GPUs."""
    return Machine(
        os=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cpus=(
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        ),
        memory_gb=memory_gb(),
        gpus=gpus(),
    )
