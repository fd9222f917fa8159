"""Owner of a server: the process that started it, written down so that a later run can tell whether it is gone.

A pid is not enough. Pids are reused, and mean something else after a reboot, in another pid namespace or on another host that shares
the Docker Engine. If it cannot be known, the owner counts as alive.
"""

from __future__ import annotations

import hashlib
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Owner", "is_gone", "this_owner"]

_SLACK_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Owner:
    """A process, distinct from every other.

    started: on Linux in clock ticks since boot, which setting the clock does not change; elsewhere in seconds since the epoch.
    boot: id of this boot; empty if the system has none. host, namespace: ids of the machine and of the pid namespace.
    """

    pid: int
    started: float
    boot: str
    host: str
    namespace: str


def this_owner() -> Owner:
    """Return this process."""
    pid = os.getpid()
    # The name of the host as well: machines cloned from one image share their id. Hashed, because labels are public.
    host = hashlib.sha256(f"{_line('/etc/machine-id')}\n{platform.node()}".encode()).hexdigest()[:16]
    return Owner(pid=pid, started=_started(pid) or 0.0, boot=_boot(), host=host, namespace=_namespace())


def is_gone(owner: Owner) -> bool:
    """Return True only if `owner` has ended for sure. A zombie has ended."""
    return _is_gone(owner, this_owner(), _started(owner.pid))


def _is_gone(owner: Owner, here: Owner, started: float | None) -> bool:
    """Return True if the owner has ended. started: when the process with its pid began; None if no process has it."""
    if owner.host != here.host:
        return False
    if owner.boot != here.boot:
        return True
    if owner.namespace != here.namespace:
        return False
    return started is None or abs(started - owner.started) > (0 if owner.boot else _SLACK_S)


def _started(pid: int) -> float | None:
    """Return when the process began, in the unit of `Owner.started`; None if it has ended."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if _boot():
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            # The name of the process ends at the last parenthesis and may hold any character.
            return float(stat.rpartition(")")[2].split()[19])
        return process.create_time()
    except (psutil.NoSuchProcess, OSError):
        return None


def _boot() -> str:
    return _line("/proc/sys/kernel/random/boot_id")


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
