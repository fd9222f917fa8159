"""Lease of GPUs: one locked file per GPU, held while a run's servers use it.

The kernel releases the locks when the process exits, also by SIGKILL. The server of a killed run
may outlive them by seconds, so a GPU is leased only when its memory is free. A faulty GPU is
reported and not leased.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from vllm_repro.errors import InfraError
from vllm_repro.host.machine import Gpu, gpus, nvidia_smi

_BUSY_MIB = 1_024
"""Memory in use that counts as busy: a driver and a screen take some hundreds."""
_DRAIN_S = 60.0
"""Seconds to wait for the memory of a server that has exited."""
_POLL_S = 0.5
_WHOSE = (
    "`nvidia-smi` shows the processes; `vllm-repro clean --yes` ends what a killed run left; a card"
    " with a fault needs a reset"
)

_FAULTY_XIDS = {"48", "62", "64", "74", "79", "92", "95", "119", "120"}
"""Xids of the hardware or its firmware.

Others, such as 13, 31 and 43, may be the bug under test.
"""
_XID = re.compile(r"NVRM: Xid \(PCI:(?:\w+:)?(\w+:\w+)[^)]*\): (\d+)")

_mine: set[str] = set()
"""Indices of the GPUs that this process holds."""


@contextlib.contextmanager
def leased_gpus(
    count: int, unfit: Callable[[Gpu], str], notify: Callable[[str], None] = lambda _: None
) -> Iterator[tuple[str, ...]]:
    """Lease `count` GPUs and yield their indices; wait while others hold them or use their memory.

    unfit: returns why a GPU cannot be used; empty if it can. notify: called with a line for each
    GPU that is set aside as faulty or busy, not while it waits.

    If CUDA_VISIBLE_DEVICES lists indices, lease only GPUs from it. Raises `InfraError` if too few
    GPUs are left, or if `nvidia-smi` fails.
    """
    with contextlib.ExitStack() as held:
        cards = _lock_gpus(count, unfit, notify, held) if count else ()
        _mine.update(cards)
        try:
            yield cards
        finally:
            _mine.difference_update(cards)


def _lock_gpus(
    count: int,
    unfit: Callable[[Gpu], str],
    notify: Callable[[str], None],
    held: contextlib.ExitStack,
) -> tuple[str, ...]:
    """Lock `count` free GPUs, with the locks in `held`, and return their indices.

    Wait without limit for cards that other runs hold, and a minute for busy or faulty ones.

    Raises `InfraError` if too few cards can become free, or if `nvidia-smi` fails.
    """
    fit = _fit_cards(unfit)
    trouble_since: dict[str, float] = {}
    # in the order of arrival: a run with many GPUs must not wait forever
    with _lock_file("queue"):
        while True:
            locks = _lock_free(fit, held)
            # Memory in use is expected on a GPU that another run holds.
            trouble = {
                index: why for index, why in (_faults() | busy_gpus()).items() if index in locks
            }
            taken = [index for index in locks if index not in trouble][:count]
            if len(taken) == count:
                for index in locks.keys() - set(taken):
                    locks[index].close()
                for why in trouble.values():
                    notify(f"{why}; set aside")
                return tuple(taken)
            held.close()
            now = time.monotonic()
            trouble_since = {index: trouble_since.get(index, now) for index in trouble}
            lost = {
                index: why
                for index, why in trouble.items()
                if now - trouble_since[index] >= _DRAIN_S
            }
            lost |= {
                index: f"GPU {index} is in use by this process" for index in _mine.intersection(fit)
            }
            if len(fit) - len(lost) < count:
                left = (
                    f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')} leaves"
                    f" {len(fit)}"
                )
                raise InfraError(
                    f"{count} GPUs are needed: {'; '.join(lost.values()) or left}", hint=_WHOSE
                )
            time.sleep(_POLL_S)


def _fit_cards(unfit: Callable[[Gpu], str]) -> list[str]:
    """Return the indices of the GPUs for which `unfit` returns no reason.

    If CUDA_VISIBLE_DEVICES lists indices, return only indices from it.
    """
    fit = [str(index) for index, gpu in enumerate(gpus()) if not unfit(gpu)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not re.fullmatch(r"\d+(,\d+)*", visible):
        return fit
    return [index for index in fit if index in visible.split(",")]


def _lock_free(cards: Sequence[str], held: contextlib.ExitStack) -> dict[str, TextIO]:
    """Lock those GPUs of `cards` that no run holds, and return the lock files by index.

    held: keeps the locks until it is closed.
    """
    locks = {}
    for index in cards:
        with contextlib.suppress(BlockingIOError):
            locks[index] = held.enter_context(_lock_file(index, fcntl.LOCK_NB))
    return locks


@contextlib.contextmanager
def _lock_file(name: str, how: int = 0) -> Iterator[TextIO]:
    """Hold the named lock file of this user on this host; wait until it is free.

    how: more flags of `flock`. With `LOCK_NB` raise `BlockingIOError` instead of waiting.
    """
    with (Path(tempfile.gettempdir()) / f"vllm-repro-gpu-{os.getuid()}-{name}.lock").open(
        "w"
    ) as file:
        fcntl.flock(file, fcntl.LOCK_EX | how)
        yield file


def busy_gpus() -> dict[str, str]:
    """Return a sentence for each GPU with more than 1,024 MiB of memory in use, by index.

    Raises `InfraError` if `nvidia-smi` fails.
    """
    return {
        index: f"GPU {index} ({name}) is busy: {int(used):,} MiB of it are in use"
        for index, name, used in nvidia_smi("index", "name", "memory.used")
        if used.isdigit() and int(used) > _BUSY_MIB
    }


def await_free_memory(cards: Sequence[str]) -> float:
    """Wait until the memory of `cards` is free, and return the seconds that it took.

    cards: indices of GPUs. Raises `InfraError` if it is not free after a minute, or if `nvidia-smi`
    fails.
    """
    began = time.monotonic()
    while cards and (busy := [line for index, line in busy_gpus().items() if index in cards]):
        if time.monotonic() - began > _DRAIN_S:
            raise InfraError(
                f"{'; '.join(busy)}, {_DRAIN_S:.0f} s after the last server ended", hint=_WHOSE
            )
        time.sleep(_POLL_S)
    return time.monotonic() - began


def _faults() -> dict[str, str]:
    """Return a sentence for each faulty GPU, by index, from its driver or the kernel's log.

    Empty if `nvidia-smi` fails.
    """
    faults: dict[str, str] = {}
    xids = _xids()
    # a driver that does not know a field; `busy_gpus` raises the other failures
    with contextlib.suppress(InfraError):
        for index, name, bus, slow in nvidia_smi(
            "index", "name", "pci.bus_id", "clocks_throttle_reasons.hw_slowdown"
        ):
            if slow == "Active":
                faults[index] = (
                    f"GPU {index} ({name}) is slowed down by its hardware, for heat or power"
                )
            if xid := xids.get(bus.lower().partition(":")[2].partition(".")[0]):
                faults[index] = f"GPU {index} ({name}) had Xid {xid} since this machine booted"
    return faults


def _xids() -> dict[str, str]:
    """Return each card's last Xid, NVIDIA's number of an error, by PCI bus and device (`17:00`).

    Only errors of the hardware or its firmware count. Empty if this user cannot read the kernel's
    log.
    """
    tool = shutil.which("dmesg")
    if tool is None:
        return {}
    log = subprocess.run(
        [tool], capture_output=True, text=True, errors="replace", check=False
    ).stdout
    return {bus.lower(): xid for bus, xid in _XID.findall(log) if xid in _FAULTY_XIDS}
