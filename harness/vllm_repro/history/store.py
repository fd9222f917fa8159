"""Store of all runs: an SQLite file beside them with a JSON row for each, built from their journals.

It can be rebuilt at any time, so a run never fails because of it. A row that could not be added is added by the next reader.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import msgspec

from vllm_repro.errors import InfraError, ReproError
from vllm_repro.history.rows import RunRow, row_of
from vllm_repro.journal.journal import being_written, legible
from vllm_repro.report.build import build
from vllm_repro.report.model import RunReport

__all__ = ["STORE", "Refresh", "Store", "remember"]

STORE = "history.sqlite"
SCHEMA = 2
_TABLE = "CREATE TABLE runs (id TEXT PRIMARY KEY, row TEXT NOT NULL) STRICT"
_REBUILD = "vllm-repro history --rebuild builds it again from the journals"


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """Result of reading the folders. added: runs read. unreadable: folders without the start of a run. gone: runs without a folder."""

    added: int
    unreadable: tuple[str, ...] = ()
    gone: int = 0


class Store:
    """Store of the runs below `root`. Every method raises `InfraError` if the file cannot be used. timeout: seconds to wait for a lock."""

    def __init__(self, root: Path, timeout: float = 30.0) -> None:
        self.root = root
        self.path = root / STORE
        self._timeout = timeout

    def add(self, rows: Iterable[RunRow]) -> None:
        """Add runs, or replace the rows they have."""
        with self._open() as connection:
            _put(connection, rows)

    def rows(self) -> list[RunRow]:
        """Return all runs in the order of their start."""
        with self._open() as connection:
            rows = [msgspec.json.decode(row, type=RunRow) for (row,) in connection.execute("SELECT row FROM runs")]
        return sorted(rows, key=lambda row: (row.started_at, row.id))

    def catch_up(self) -> Refresh:
        """Add runs that have a folder but no row, and read again those that were interrupted. Running ones are skipped."""
        known = {row.id: row for row in self.rows()}
        fresh, unreadable = _read(folder for folder in _folders(self.root) if _is_new(folder, known, self.root))
        fresh = [row for row in fresh if row != known.get(row.id)]
        if fresh:
            self.add(fresh)
        return Refresh(added=len(fresh), unreadable=unreadable, gone=self._gone(known))

    def rebuild(self) -> Refresh:
        """Build the store again. A file that is damaged, or has runs whose folders are gone, is kept as `history.sqlite.old`."""
        rows, unreadable = _read(_folders(self.root))
        try:
            gone = self._gone(row.id for row in self.rows())
            move = gone > 0
        except InfraError:
            gone, move = 0, self.path.exists()
        if move:
            self._move_old()
        with self._open() as connection:
            # A run that ended since the folders were read is added again by the next `catch_up`.
            connection.execute("DELETE FROM runs")
            _put(connection, rows)
        return Refresh(added=len(rows), unreadable=unreadable, gone=gone)

    def _gone(self, runs: Iterable[str]) -> int:
        return sum(not (self.root / run).is_dir() for run in runs)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open a connection with an exclusive write transaction; create the table in a new file."""
        try:
            connection = sqlite3.connect(self.path, timeout=self._timeout, isolation_level=None)
        except sqlite3.Error as error:
            raise InfraError(f"{self.path} cannot be opened: {error}", hint=_REBUILD) from error
        try:
            connection.execute("BEGIN IMMEDIATE")
            (schema,) = connection.execute("PRAGMA user_version").fetchone()
            if schema not in (0, SCHEMA):
                age = "an older" if schema < SCHEMA else "a newer"
                raise InfraError(f"{self.path} was written by {age} vllm-repro", hint=_REBUILD)
            if schema == 0:
                if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
                    raise InfraError(f"{self.path} is not a store of runs", hint=_REBUILD)
                connection.execute(_TABLE)
                connection.execute(f"PRAGMA user_version = {SCHEMA}")
            yield connection
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            busy = isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
            problem = "is in use by another program" if busy else f"cannot be used: {error}"
            raise InfraError(f"{self.path} {problem}", hint=_REBUILD) from error
        except ValueError as error:  # a row that this release does not read or cannot write
            raise InfraError(f"{self.path} cannot be used: {error}", hint=_REBUILD) from error
        finally:
            with contextlib.suppress(sqlite3.Error):  # keep the first error
                connection.close()  # rolls back what was not committed

    def _move_old(self) -> None:
        names = (self.path.with_name(f"{STORE}.old{number or ''}") for number in count())
        try:
            self.path.rename(next(path for path in names if not path.exists()))
            # SQLite would roll this journal back into the new file.
            self.path.with_name(f"{STORE}-journal").unlink(missing_ok=True)
        except OSError as error:
            raise InfraError(f"{self.path} cannot be moved: {error.strerror}", hint="remove it by hand") from error


def remember(report: RunReport, root: Path) -> str:
    """Add a run's report to the store; return a message if that fails, else an empty string."""
    try:
        Store(root).add([row_of(report)])
    except ReproError as error:
        return f"the run is not in the history: {error.with_hint}"
    return ""


def _put(connection: sqlite3.Connection, rows: Iterable[RunRow]) -> None:
    values = ((row.id, msgspec.json.encode(row).decode()) for row in rows)
    connection.executemany("INSERT OR REPLACE INTO runs VALUES (?, ?)", values)


def _is_new(folder: Path, known: dict[str, RunRow], root: Path) -> bool:
    row = known.get(folder.relative_to(root).as_posix())
    return (row is None or row.cut or row.interrupted is not None) and not being_written(folder / "journal.jsonl")


def _folders(root: Path) -> list[Path]:
    """Return the folders of runs, `<scenario>/<run>/`."""
    return sorted(path.parent for path in root.glob("*/*/journal.jsonl") if not path.parent.is_symlink())


def _read(folders: Iterable[Path]) -> tuple[list[RunRow], tuple[str, ...]]:
    """Return the rows of these folders, and the names of those without a readable run."""
    rows: list[RunRow] = []
    unreadable: list[str] = []
    for folder in folders:
        name = f"{folder.parent.name}/{folder.name}"
        try:
            with legible(folder):
                row = row_of(build(folder))
        except ReproError:
            unreadable.append(name)
            continue
        if row.id == name:  # else a copy, such as an example
            rows.append(row)
    return rows, tuple(unreadable)
