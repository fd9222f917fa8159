"""Store of all runs: an SQLite file beside them, built from their journals.

It can be rebuilt at any time, so a run never fails because of it. A row that could not be added is added by the next reader.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from vllm_repro.errors import InfraError, ReproError
from vllm_repro.history.rows import ArmRow, Build, Figure, RunRow, row_of
from vllm_repro.journal.journal import being_written
from vllm_repro.report.build import build
from vllm_repro.report.model import RunReport
from vllm_repro.verdict.throughput import Point
from vllm_repro.verdict.verdict import Expected, Result, Standing, Verdict

__all__ = ["STORE", "Refresh", "Store", "remember"]

STORE = "history.sqlite"
SCHEMA = 1
_REBUILD = "vllm-repro history --rebuild builds it again from the journals"

_TABLES = (
    """CREATE TABLE IF NOT EXISTS runs (
        id TEXT PRIMARY KEY, scenario TEXT NOT NULL, issue TEXT NOT NULL, started_at TEXT NOT NULL, host TEXT NOT NULL,
        hardware TEXT NOT NULL, evidence TEXT NOT NULL, server TEXT NOT NULL, version TEXT, build TEXT NOT NULL,
        standing TEXT NOT NULL, verdict TEXT NOT NULL, expected INTEGER, because TEXT NOT NULL, interrupted TEXT,
        cut INTEGER NOT NULL, infra INTEGER NOT NULL) STRICT""",
    """CREATE TABLE IF NOT EXISTS arms (
        run TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE, place INTEGER NOT NULL, name TEXT NOT NULL,
        expected TEXT NOT NULL, result TEXT NOT NULL, crashed INTEGER NOT NULL, boots INTEGER NOT NULL,
        patched INTEGER NOT NULL, signature TEXT NOT NULL, setup TEXT NOT NULL, PRIMARY KEY (run, place)) STRICT""",
    """CREATE TABLE IF NOT EXISTS figures (
        run TEXT NOT NULL, arm INTEGER NOT NULL, place INTEGER NOT NULL, prompt INTEGER NOT NULL, output INTEGER NOT NULL,
        concurrency INTEGER NOT NULL, quantity TEXT NOT NULL, median REAL NOT NULL, low REAL NOT NULL, high REAL NOT NULL,
        n INTEGER NOT NULL, boots INTEGER NOT NULL, PRIMARY KEY (run, arm, place),
        FOREIGN KEY (run, arm) REFERENCES arms(run, place) ON DELETE CASCADE) STRICT""",
)


@dataclass(frozen=True, kw_only=True)
class Refresh:
    """Result of reading the folders. added: new runs. unreadable: folders without the start of a run. gone: runs without a folder."""

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
            for row in rows:
                _put(connection, row)

    def rows(self) -> list[RunRow]:
        """Return all runs in the order of their start."""
        with self._open() as connection:
            return list(_rows(connection))

    def catch_up(self) -> Refresh:
        """Add runs that have a folder but no row, and read again those that were interrupted. Running ones are skipped."""
        known = {row.id: row for row in self.rows()}
        fresh, unreadable = _read(folder for folder in _folders(self.root) if _is_new(folder, known, self.root))
        fresh = [row for row in fresh if row != known.get(row.id)]
        if fresh:
            self.add(fresh)
        gone = sum(not (self.root / run).is_dir() for run in known)
        return Refresh(added=len(fresh), unreadable=unreadable, gone=gone)

    def rebuild(self) -> Refresh:
        """Build the store again. A file that is damaged, or has runs whose folders are gone, is kept as `history.sqlite.old`."""
        rows, unreadable = _read(_folders(self.root))
        try:
            known = [row.id for row in self.rows()]
        except InfraError:
            known = []
            if self.path.exists():
                self._move_old()
        gone = [run for run in known if not (self.root / run).is_dir()]
        if gone:
            self._copy_old()
        with self._open() as connection:
            # A run that ended after the folders were read keeps the row that it added.
            mine = {row.id for row in rows}
            here = [run for (run,) in connection.execute("SELECT id FROM runs")]
            for run in here:
                if run in mine or not (self.root / run).is_dir():
                    connection.execute("DELETE FROM runs WHERE id = ?", (run,))
            for row in rows:
                _put(connection, row)
        return Refresh(added=len(rows), unreadable=unreadable, gone=len(gone))

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open a connection with an exclusive write transaction; create the tables in a new file."""
        try:
            connection = sqlite3.connect(self.path, timeout=self._timeout, isolation_level=None)
        except sqlite3.Error as error:
            raise InfraError(f"{self.path} cannot be opened: {error}", hint=_REBUILD) from error
        try:
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("BEGIN IMMEDIATE")
            (schema,) = connection.execute("PRAGMA user_version").fetchone()
            if schema not in (0, SCHEMA):
                age = "an older" if schema < SCHEMA else "a newer"
                raise InfraError(f"{self.path} was written by {age} vllm-repro", hint=_REBUILD)
            if schema == 0:
                if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() != (0,):
                    raise InfraError(f"{self.path} is not a store of runs", hint=_REBUILD)
                for table in _TABLES:
                    connection.execute(table)
                connection.execute(f"PRAGMA user_version = {SCHEMA}")
            yield connection
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            busy = isinstance(error, sqlite3.OperationalError) and "locked" in str(error)
            what = "is in use by another program" if busy else f"cannot be used: {error}"
            raise InfraError(f"{self.path} {what}", hint=_REBUILD) from error
        except ValueError as error:  # an unknown enum value
            raise InfraError(f"{self.path} cannot be used: {error}", hint=_REBUILD) from error
        finally:
            with contextlib.suppress(sqlite3.Error):  # keep the first error
                connection.close()  # rolls back what was not committed

    def _old_path(self) -> Path:
        names = (self.path.with_name(f"{STORE}.old{number or ''}") for number in count())
        return next(path for path in names if not path.exists())

    def _move_old(self) -> None:
        try:
            self.path.rename(self._old_path())
            # SQLite would roll this journal back into the new file.
            journal = self.path.with_name(f"{STORE}-journal")
            if journal.exists():
                journal.unlink()
        except OSError as error:
            raise InfraError(f"{self.path} cannot be moved: {error.strerror}", hint="remove it by hand") from error

    def _copy_old(self) -> None:
        try:
            with (
                contextlib.closing(sqlite3.connect(self.path, timeout=self._timeout)) as source,
                contextlib.closing(sqlite3.connect(self._old_path())) as target,
            ):
                source.backup(target)
        except sqlite3.Error as error:
            raise InfraError(f"{self.path} cannot be copied: {error}", hint="free some space") from error


def remember(report: RunReport, root: Path) -> str:
    """Add a run's report to the store; return a message if that fails, else an empty string."""
    try:
        Store(root).add([row_of(report)])
    except ReproError as error:
        return f"the run is not in the history: {error.told}"
    return ""


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
            row = row_of(build(folder))
        # Written by another version, or edited.
        except (ReproError, KeyError, TypeError, ValueError, AttributeError):
            unreadable.append(name)
            continue
        if row.id == name:  # else a copy, such as an example
            rows.append(row)
    return rows, tuple(unreadable)


def _put(connection: sqlite3.Connection, row: RunRow) -> None:
    connection.execute("DELETE FROM runs WHERE id = ?", (row.id,))
    expected = None if row.expected is None else int(row.expected)
    values = (
        *(row.id, row.scenario, row.issue, row.started_at, row.host, row.hardware, row.evidence, row.server),
        *(row.version, row.build, row.standing, row.verdict, expected, row.because, row.interrupted),
        *(int(row.cut), int(row.infra)),
    )
    connection.execute(f"INSERT INTO runs VALUES ({', '.join('?' * len(values))})", values)
    for place, arm in enumerate(row.arms):
        fields = (
            arm.name,
            arm.expected,
            arm.result,
            arm.crashed,
            arm.boots,
            int(arm.patched),
            arm.signature,
            arm.setup,
        )
        connection.execute("INSERT INTO arms VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (row.id, place, *fields))
        for number, one in enumerate(arm.figures or ()):
            point = (one.point.prompt, one.point.output, one.point.concurrency)
            spread = (one.quantity, one.median, one.low, one.high, one.n, one.boots)
            connection.execute(
                "INSERT INTO figures VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (row.id, place, number, *point, *spread),
            )


def _rows(connection: sqlite3.Connection) -> Iterator[RunRow]:
    figures: dict[tuple[str, int], list[Figure]] = {}
    for run, arm, _, prompt, output, concurrency, *spread in connection.execute(
        "SELECT * FROM figures ORDER BY run, arm, place"
    ):
        figures.setdefault((run, arm), []).append(_figure(Point(prompt, output, concurrency), spread))
    arms: dict[str, list[ArmRow]] = {}
    for found in connection.execute("SELECT * FROM arms ORDER BY run, place"):
        arms.setdefault(found[0], []).append(_arm(found, figures.get((found[0], found[1]), ())))
    for found in connection.execute("SELECT * FROM runs ORDER BY started_at, id"):
        run, scenario, issue, started_at, host, hardware, evidence, server, version, *rest = found
        build_, standing, verdict, expected, because, interrupted, cut, infra = rest
        yield RunRow(
            id=run,
            scenario=scenario,
            issue=issue,
            started_at=started_at,
            host=host,
            hardware=hardware,
            evidence=evidence,
            server=server,
            version=version,
            build=Build(build_),
            standing=Standing(standing),
            verdict=Verdict(verdict),
            expected=None if expected is None else bool(expected),
            because=because,
            interrupted=interrupted,
            cut=bool(cut),
            infra=bool(infra),
            arms=tuple(arms.get(run, ())),
        )


def _arm(found: Sequence[Any], figures: Sequence[Figure]) -> ArmRow:
    _, _, name, expected, result, crashed, boots, patched, signature, setup = found
    return ArmRow(
        name=name,
        expected=Expected(expected),
        result=Result(result),
        crashed=crashed,
        boots=boots,
        patched=bool(patched),
        signature=signature,
        setup=setup,
        figures=tuple(figures) or None,
    )


def _figure(point: Point, spread: Sequence[Any]) -> Figure:
    quantity, median, low, high, n, boots = spread
    return Figure(point=point, quantity=quantity, median=median, low=low, high=high, n=n, boots=boots)
