"""The runs of a folder of reports, each read from its `report.json`.

There is no other store: removing a run's folder removes it from the history.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from datetime import datetime
from functools import cached_property
from pathlib import Path

import msgspec

import vllm_repro
from vllm_repro.conversion import decode
from vllm_repro.errors import ReproError
from vllm_repro.journal.journal import legible
from vllm_repro.releases.disk import cache_root
from vllm_repro.report.build import build
from vllm_repro.report.runs import Run, run_of
from vllm_repro_diagnosis.evidence import facts_of

_MOST_FOLDERS = 16
"""Most files in the cache, each with the runs of one folder of reports."""


def read_runs(root: Path) -> tuple[list[Run], list[str]]:
    """Return the runs below `root` by start time, and the folders whose journal holds no run.

    Left out are runs that are still being written, symbolic links, and copies of runs. Runs that
    had to be read from their journals are written to the cache.
    """
    runs: list[Run] = []
    unreadable: list[str] = []
    cache = _Cache(root)
    for journal in sorted(root.glob("*/*/journal.jsonl")):
        name = journal.parent.relative_to(root).as_posix()
        if journal.parent.is_symlink():
            continue
        try:
            run = _read(journal.parent, name, cache)
        except ReproError:
            unreadable.append(name)
            continue
        if run is not None and run.id == name:  # else a copy, such as an example
            runs.append(run)
    cache.save()
    return sorted(runs, key=lambda run: (run.started_at, run.id)), unreadable


def _read(folder: Path, name: str, cache: _Cache) -> Run | None:
    """Return a run from its report or its journal; None while it is being written.

    The journal is read if the report is missing, older, or of another version of vllm-repro. Raises
    `UsageError` if it holds no run.
    """
    report, journal = folder / "report.json", folder / "journal.jsonl"
    with contextlib.suppress(OSError, ValueError):
        if report.stat().st_mtime_ns >= journal.stat().st_mtime_ns:
            return _decoded(report.read_bytes(), folder)
    if _being_written(journal):
        return None
    with legible(folder):
        return _decoded(cache.rendered(folder, name), folder)


_WITH_RATE = re.compile(rb'"rate": ?(?:[1-9]|0\.0*[1-9])')


def _decoded(report: bytes, folder: Path) -> Run:
    """Return the run in the bytes of a report, with its id.

    Raises `ValueError` if it is of another version of vllm-repro.
    """
    if _WITH_RATE.search(report):
        raise ValueError("its figures at a rate are no longer read")
    run = decode(report, Run)
    datetime.fromisoformat(run.started_at)
    facts_of(run.evidence)
    return msgspec.structs.replace(run, id=f"{run.scenario}/{folder.name}")


# ── cache
# ──────────────────────────────────────────────────────────────────────────────────────────────────


class _Kept(msgspec.Struct, array_like=True):
    """One run in the cache, and the state of the journal that it was made from."""

    # inode, bytes, and time of the last change
    journal: tuple[int, int, int]
    # as JSON
    run: msgspec.Raw


class _Cache:
    """Runs rendered from journals without a current report: rendering one takes 8 ms.

    Each folder of reports has one file in the cache, because it may be read-only. A run is rendered
    again once its journal or the code changes.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._current: dict[str, _Kept] = {}

    def rendered(self, folder: Path, name: str) -> bytes:
        """Return the run in a folder as JSON: from the cache, or rendered now and kept for `save`.

        name: `folder`, relative to that of all reports.
        """
        state = (folder / "journal.jsonl").stat()
        identity = state.st_ino, state.st_size, state.st_mtime_ns
        kept = self._before.get(name)
        if kept is None or kept.journal != identity:
            kept = _Kept(identity, msgspec.Raw(msgspec.json.encode(run_of(build(folder)))))
        self._current[name] = kept
        return bytes(kept.run)

    def save(self) -> None:
        """Write the cache if a run was rendered, and remove the oldest files beyond 16.

        Only the runs that were asked for stay in it.

        A cache that cannot be written is no error: the next call renders again.
        """
        if all(self._before.get(name) is kept for name, kept in self._current.items()):
            return
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._file.parent, delete=False) as file:
                file.write(msgspec.json.encode(self._current))
            Path(file.name).replace(self._file)
            for old in sorted(self._file.parent.iterdir(), key=os.path.getmtime)[:-_MOST_FOLDERS]:
                old.unlink()

    @cached_property
    def _file(self) -> Path:
        """Return the cache file, named after the folder, and this package's version and code."""
        files = Path(vllm_repro.__file__).parent.rglob("*.py")
        code = f"{vllm_repro.__version__} {max(map(os.path.getmtime, files))}"
        name = hashlib.blake2s(f"{self._root.resolve()} {code}".encode(), digest_size=8).hexdigest()
        return cache_root() / "history" / f"{name}.json"

    @cached_property
    def _before(self) -> dict[str, _Kept]:
        """Return what the cache file holds from earlier calls; empty if it cannot be read."""
        try:
            return decode(self._file.read_bytes(), dict[str, _Kept])
        except (OSError, ValueError):
            return {}


def _being_written(path: Path) -> bool:
    """Return True if a process is writing the journal at `path`; False if that cannot be told.

    Reads the kernel's list of locks: taking the lock could disturb a run.
    """
    try:
        inode = path.stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return False
    return any(" FLOCK " in line and f":{inode} " in line for line in locks.splitlines())
