"""Cache folder: its path, its size on disk, its lock, and the processes that use it."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from vllm_repro.errors import InfraError

Progress = Callable[[str], None]
"""Receives one line of progress at a time."""


def cache_root(environment: Mapping[str, str] | None = None) -> Path:
    """Return the folder of the cache: installed releases, tiny models, patched copies of vLLM.

    `$VLLM_REPRO_CACHE`, else `$XDG_CACHE_HOME/vllm-repro`, else `~/.cache/vllm-repro`.
    """
    env = os.environ if environment is None else environment
    if chosen := env.get("VLLM_REPRO_CACHE"):
        return Path(chosen).expanduser().absolute()
    shared = Path(env.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "vllm-repro"


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` to `path` at once: other processes see the old file or the new one.

    Raises `OSError`.
    """
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        fresh.write_bytes(content)
        fresh.replace(path)
    finally:
        with suppress(OSError):  # half a file, if the disk is full
            fresh.unlink(missing_ok=True)


def human_size(count: int) -> str:
    """Return a number of bytes as text in decimal MB or GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def disk_usage(folders: Sequence[Path]) -> int:
    """Return the bytes of all files under `folders`. A file with several hard links counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for folder in folders:
        for parent, _, names in os.walk(folder):
            for name in names:
                try:
                    status = os.lstat(f"{parent}/{name}")
                except FileNotFoundError:  # removed by another process meanwhile
                    continue
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


@contextmanager
def locked(root: Path, purpose: str, progress: Progress) -> Iterator[None]:
    """Hold the lock of the cache at `root`: only one process at a time may write there.

    Wait while another process holds it, and report the purpose of that process. The kernel releases
    the lock when its holder exits. purpose: shown to those who wait. Raises `InfraError` if `root`
    cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / "lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise InfraError(
            f"cannot use the cache at {root}: {error}",
            hint="Set VLLM_REPRO_CACHE to a folder that you can write.",
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            progress(f"waiting for another run: {file.read() or 'it has just started'}")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"{purpose} (pid {os.getpid()})")
        file.flush()
        yield


def processes_using(folder: Path) -> list[int]:
    """Return the pids of this user's processes that have a file under `folder` mapped.

    Linux only.
    """
    needle, pids = f" {folder}/".encode(), []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if needle in maps.read_bytes():
                pids.append(int(maps.parent.name))
        except OSError:  # the process has exited, or belongs to another user
            continue
    return sorted(pids)
