"""What an install takes, for saying it before it starts. A wheel's own size is known only once it is there, so these are figures
of others like it.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_repro.releases.knowledge import human_size

__all__ = ["Size", "base_size", "further_set_size", "largest_install", "release_size", "set_size"]


@dataclass(frozen=True)
class Size:
    """In bytes: what is downloaded, and what stays on disk. pip may keep what it downloads in a cache of its own besides."""

    download: int
    disk: int

    def __add__(self, other: Size) -> Size:
        return Size(self.download + other.download, self.disk + other.disk)

    def __str__(self) -> str:
        return f"about {human_size(self.disk)} ({human_size(self.download)} to download)"

    @property
    def room(self) -> int:
        """What must be free: a download is kept until it is unpacked."""
        return self.download + self.disk


# Measured with Python 3.11 on x86_64 Linux, rounded up.
_RELEASE = Size(download=120_000_000, disk=530_000_000)
_SET = Size(download=400_000_000, disk=1_500_000_000)
_FURTHER_SET = Size(download=100_000_000, disk=400_000_000)
_CPU_BASE = Size(download=500_000_000, disk=1_500_000_000)
_CUDA_BASE = Size(download=2_600_000_000, disk=5_000_000_000)

# These had no CPU build among ordinary wheels: pip then takes the CUDA build, which works on a CPU and is far larger.
_CUDA_BUILDS = frozenset({"2.10.0", "2.11.0"})


def release_size() -> Size:
    """A release itself: its wheel, and that unpacked with its compiled files."""
    return _RELEASE


def set_size() -> Size:
    """The first dependency set for a torch, without torch and what torch brings."""
    return _SET


def further_set_size() -> Size:
    """One that stands on another set, and holds only what differs."""
    return _FURTHER_SET


def base_size(torch: str | None) -> Size:
    """torch and what it needs; that of a CPU build where it is not known."""
    return _CUDA_BASE if torch in _CUDA_BUILDS else _CPU_BASE


def largest_install() -> Size:
    """The largest first install that is known."""
    return _RELEASE + _SET + _CUDA_BASE
