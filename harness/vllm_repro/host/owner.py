"""Who made a container or process, written down so that a later run can tell whether its maker still lives.

A pid alone says nothing: pids are used again, start anew with each boot, and mean something else in another
pid namespace or on another host with the same Docker Engine. Where it cannot be told whether an owner lives
it counts as living: removing what a living run uses would be worse than leaving something behind.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil

__all__ = ["Fate", "Owner", "fate", "is_alive", "judge", "this_owner"]

_SLACK_S = 2.0


class Fate(StrEnum):
    """What became of an owner."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"  # of another host or pid namespace: out of sight from here


@dataclass(frozen=True)
class Owner:
    """A process, told from every other.

    started: when it began. On Linux in clock ticks since boot, which no change of the wall clock moves;
    elsewhere in seconds since the epoch. boot: an id of this boot, empty where the system has none.
    host, namespace: ids of the machine and of the pid namespace.
    """

    pid: int
    started: float
    boot: str
    host: str
    namespace: str

    def labels(self, prefix: str) -> dict[str, str]:
        """As labels of a container: `<prefix>.pid`, `<prefix>.started` and so on."""
        return {
            f"{prefix}.pid": str(self.pid),
            f"{prefix}.started": repr(self.started),
            f"{prefix}.boot": self.boot,
            f"{prefix}.host": self.host,
            f"{prefix}.namespace": self.namespace,
        }

    @classmethod
    def from_labels(cls, labels: Mapping[str, str], prefix: str) -> Owner | None:
        """The owner that `labels` wrote, None where they are missing or damaged."""
        try:
            return cls(
                int(labels[f"{prefix}.pid"]),
                float(labels[f"{prefix}.started"]),
                labels[f"{prefix}.boot"],
                labels[f"{prefix}.host"],
                labels[f"{prefix}.namespace"],
            )
        except (KeyError, ValueError):
            return None


def judge(owner: Owner, here: Owner, started: float | None) -> Fate:
    """The fate of `owner` as seen from `here`.

    started: when the process that has its pid now began; None where there is none.
    """
    if owner.host != here.host:
        return Fate.UNKNOWN
    if owner.boot != here.boot:
        return Fate.GONE
    if owner.namespace != here.namespace:
        return Fate.UNKNOWN
    if started is None or abs(started - owner.started) > (0 if owner.boot else _SLACK_S):
        return Fate.GONE
    return Fate.ALIVE


def this_owner() -> Owner:
    """This process."""
    pid = os.getpid()
    started = _started(pid)
    return Owner(pid, 0.0 if started is None else started, _boot(), _host(), _namespace())


def fate(owner: Owner) -> Fate:
    """What became of `owner`; a process that ended and was not reaped is gone."""
    return judge(owner, this_owner(), _started(owner.pid))


def is_alive(owner: Owner) -> bool:
    """False only where `owner` is gone for sure."""
    return fate(owner) is not Fate.GONE


def _started(pid: int) -> float | None:
    """When the process began, in the unit of `Owner.started`; None where there is none, or its zombie."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if _boot():
            # psutil gives wall-clock time here, which moves when the clock is set.
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            # The process's name stands before the last parenthesis and may hold anything.
            return float(stat.rpartition(")")[2].split()[19])
        return process.create_time()
    except (psutil.NoSuchProcess, OSError):
        return None


def _boot() -> str:
    return _line("/proc/sys/kernel/random/boot_id")


def _host() -> str:
    """Machine id and name, as machines cloned from one image share the first; hashed, as it is in labels."""
    return hashlib.sha256(f"{_line('/etc/machine-id')}\n{platform.node()}".encode()).hexdigest()[:16]


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
