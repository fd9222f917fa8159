"""Cache of runs rendered from journals without a current report: rendering takes 8 ms.

Each folder of reports has one file, because it may be read-only. A run is rendered again once its
journal or the code changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from functools import cached_property
from pathlib import Path

import msgspec

import vllm_repro
from vllm_repro.conversion import decode
from vllm_repro.releases.disk import cache_root

__all__ = ["Rendered"]

_MOST_FOLDERS = 16


class _Kept(msgspec.Struct, array_like=True):
    """One run as JSON, and what its journal was: inode, bytes, time of its last change."""

    journal: tuple[int, int, int]
    run: msgspec.Raw


class Rendered:
    """The kept runs of one folder of reports, by their own folders below it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._current: dict[str, _Kept] = {}
        self._changed = False

    def get(self, name: str, journal: os.stat_result) -> bytes | None:
        """Return the run of an unchanged journal."""
        kept = self._before.get(name)
        if kept is None or kept.journal != _identity(journal):
            return None
        self._current[name] = kept
        return bytes(kept.run)

    def add(self, name: str, journal: os.stat_result, run: bytes) -> None:
        self._current[name] = _Kept(_identity(journal), msgspec.Raw(run))
        self._changed = True

    def save(self) -> None:
        """Write what was read or added.

        A cache that cannot be written is no error: the next call renders again.
        """
        if not self._changed:
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
        """Name the file after the folder, and this package's version and latest change."""
        files = Path(vllm_repro.__file__).parent.rglob("*.py")
        code = f"{vllm_repro.__version__} {max(map(os.path.getmtime, files))}"
        name = hashlib.blake2s(f"{self._root.resolve()} {code}".encode(), digest_size=8).hexdigest()
        return cache_root() / "history" / f"{name}.json"

    @cached_property
    def _before(self) -> dict[str, _Kept]:
        try:
            return decode(self._file.read_bytes(), dict[str, _Kept])
        except (OSError, ValueError):
            return {}


def _identity(journal: os.stat_result) -> tuple[int, int, int]:
    return journal.st_ino, journal.st_size, journal.st_mtime_ns
