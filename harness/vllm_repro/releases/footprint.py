"""What an install takes, for saying it before it starts. A wheel's own size is known only once it is there, so these are figures
of others like it.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_repro.releases.knowledge import human_size

__all__ = ["Size", "base_size", "further_set_size", "largest_install", "release_size", "set_size"]


@dataclass(frozen=True)
class Size:
    """In bytes: what is downloaded, and what stays on disk. pip may keep what it downloads in a cache of its own besides.

    cuda: how much more it is where pip finds only the CUDA build of torch, which is known only once pip has it; None where that
    makes no difference.
    """

    download: int
    disk: int
    cuda: Size | None = None

    def __add__(self, other: Size) -> Size:
        return Size(self.download + other.download, self.disk + other.disk, self.cuda or other.cuda)

    def __str__(self) -> str:
        said = f"about {human_size(self.disk)} ({human_size(self.download)} to download)"
        if self.cuda is None:
            return said
        disk, download = self.disk + self.cuda.disk, self.download + self.cuda.download
        return f"{said}, or {human_size(disk)} ({human_size(download)}) if pip finds only the CUDA build of torch,"

    @property
    def room(self) -> int:
        """What must be free: a download is kept until it is unpacked."""
        return self.download + self.disk


# Measured with Python 3.11 on x86_64 Linux, rounded up. The two differ in whose the gigabyte of triton is: torch 2.11.0 as a CUDA
# build needs it itself, and with the CPU build of torch 2.13.0 it is the release that asks for it.
_RELEASE = Size(download=140_000_000, disk=550_000_000)
_FURTHER_SET = Size(download=20_000_000, disk=130_000_000)
_CUDA = (Size(download=1_800_000_000, disk=4_900_000_000), Size(download=300_000_000, disk=1_100_000_000))
_CPU = (
    Size(download=210_000_000, disk=900_000_000, cuda=Size(download=1_400_000_000, disk=3_000_000_000)),
    Size(download=570_000_000, disk=2_100_000_000),
)

# These had no CPU build among ordinary wheels: pip then takes the CUDA build, which works on a CPU and is far larger.
_CUDA_BUILDS = frozenset({"2.10.0", "2.11.0"})


def release_size() -> Size:
    """A release itself: its wheel, and that unpacked with its compiled files."""
    return _RELEASE


def set_size(torch: str | None) -> Size:
    """The first dependency set for a torch, without torch and what torch brings."""
    return _of(torch)[1]


def further_set_size() -> Size:
    """A set that stands on another one, and holds only what differs."""
    return _FURTHER_SET


def base_size(torch: str | None) -> Size:
    """torch and what it needs; that of a CPU build where it is not known, with what a CUDA build would add."""
    return _of(torch)[0]


def largest_install() -> Size:
    """The largest first install that is known."""
    return _RELEASE + _CUDA[0] + _CUDA[1]


def _of(torch: str | None) -> tuple[Size, Size]:
    return _CUDA if torch in _CUDA_BUILDS else _CPU
