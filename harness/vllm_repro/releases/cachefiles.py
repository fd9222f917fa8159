"""Folders that are whole or not there, and a lock that dies with its holder: what a cache on disk needs to be
shared and believed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_repro.errors import InfraError
from vllm_repro.releases.pip_install import Progress, folder_size

_MARKER = "complete.json"
_PARTIAL = ".partial-"
_TICK_S = 0.5
_SAY_EVERY_S = 15.0


@contextmanager
def becoming(final: Path) -> Iterator[Path]:
    """A temporary folder beside `final` that takes its name when the block ends well, and is gone when it
    does not.

    A folder that has the name already is replaced, so this is for names whose folder is not whole.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.parent / f"{_PARTIAL}{final.name}-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def remove_partial(parent: Path) -> None:
    """Removes what a killed `becoming` left in `parent`. Only for the holder of the lock: a living one looks
    the same.
    """
    for folder in parent.glob(f"{_PARTIAL}*"):
        shutil.rmtree(folder, ignore_errors=True)


def remove_broken(parent: Path) -> None:
    """Removes the folders in `parent` that nothing declares whole, but none that a process runs from. Only for the holder of the lock."""
    remove_partial(parent)
    for folder in parent.glob("*"):
        if read_marker(folder) is None and not processes_using(folder):
            shutil.rmtree(folder, ignore_errors=True)


def revoke_marker(folder: Path) -> None:
    """Declares a folder no longer whole."""
    (folder / _MARKER).unlink(missing_ok=True)


def write_marker(folder: Path, *, seconds: float, **facts: object) -> None:
    """Declares a folder whole, with its size in bytes, the seconds it took and other facts about it."""
    text = json.dumps({**facts, "size": folder_size(folder), "seconds": round(seconds, 1)}, indent=1, sort_keys=True)
    (folder / _MARKER).write_text(text + "\n", encoding="utf-8")


def read_marker(folder: Path) -> dict[str, Any] | None:
    """The facts about a whole folder; None for one that is not whole."""
    if folder.name.startswith(_PARTIAL):
        return None
    try:
        facts = json.loads((folder / _MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return facts if isinstance(facts, dict) and isinstance(facts.get("size"), int) else None


@contextmanager
def locked(root: Path, doing: str, progress: Progress) -> Iterator[None]:
    """Held by one process or thread at a time; whoever waits says what for. The kernel releases it when the
    holder dies.
    """
    path = root / "lock"
    try:
        while True:
            root.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                _acquire(handle, progress)
                if _is_still(handle, path):
                    break
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)  # its holder removed the cache, and the lock with it
    except OSError as error:
        raise InfraError(
            f"cannot use the cache at {root}: {error}", hint="Set VLLM_REPRO_CACHE to a folder of yours."
        ) from error
    try:
        with contextlib.suppress(OSError):  # on a full disk the lock holds as well without saying for what
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{doing} (pid {os.getpid()})".encode(), 0)
        yield
    finally:
        os.close(handle)


def processes_using(root: Path) -> list[int]:
    """Pids that have a file under `root` mapped, as every process of a running vLLM does whatever title it
    gave itself.

    Linux only, and only processes that this user may look at; empty elsewhere.
    """
    needle = f" {root}/".encode()
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if needle in maps.read_bytes():
                found.append(int(maps.parent.name))
        except OSError:
            continue  # ended meanwhile, or somebody else's
    return sorted(found)


def _acquire(handle: int, progress: Progress) -> None:
    said: float | None = None
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            now = time.monotonic()
            if said is None or now - said >= _SAY_EVERY_S:
                holder = os.pread(handle, 200, 0).decode(errors="replace") or "one that is just starting"
                progress(f"waiting for another run: {holder}")
                said = now
            time.sleep(_TICK_S)
        else:
            return


def _is_still(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
