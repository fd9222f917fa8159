"""The journal: an append-only record of a run, one JSON object a line, flushed as things happen.

It is the truth of a run; every report is a rendering of it and can be made again. A line carries `t` (seconds since the epoch),
`event` (what happened) and fields of that event. A run that was killed leaves a journal that ends early, possibly in the middle of a
line: `read` gives what is there and says that it is cut. Keys and tokens never get here: a marker says what was taken out.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from enum import Enum
from pathlib import Path
from threading import Lock
from typing import Any, Self

from vllm_repro import __version__
from vllm_repro.errors import InfraError, UsageError
from vllm_repro.journal.redact import Redactor

__all__ = ["SCHEMA", "Entry", "Journal", "Recording", "being_written", "head_of", "json_of", "legible", "read"]

SCHEMA = 1
"""Which journals these are; it rises with a change after which an older release would misread one."""

LAST_EVENT = "run-ended"


@dataclass(frozen=True)
class Entry:
    """One line: when (epoch seconds), what, and its fields."""

    t: float
    event: str
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.fields.get(name, default)


@dataclass(frozen=True)
class Recording:
    """What a journal holds. `cut`: it does not end as a finished run's does; `damaged`: lines that could not be read."""

    entries: tuple[Entry, ...]
    cut: bool
    damaged: int = 0

    def of(self, event: str) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry.event == event)

    def first(self, event: str) -> Entry | None:
        return next(self.of(event), None)

    @property
    def end(self) -> Entry | None:
        """What ended the run; None where it is cut."""
        return None if self.cut else self.entries[-1]


def json_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields as they read in a journal."""
    read_again: dict[str, Any] = json.loads(_dumped(fields))
    return read_again


def _dumped(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written to the journal")


class Journal:
    """Appends to `path`, after what a cut run may have left there, without any secret.

    Each line reaches the kernel before `write` returns, so a killed harness loses none. Raises `UsageError` where another process
    writes the same journal.

    redactor: what it is written through. Private names stay, for a later command needs the paths.
    """

    def __init__(self, path: Path, redactor: Redactor | None = None) -> None:
        self.path = path
        self._redactor = redactor or Redactor(names=False)
        # Trials and the threads of servers write at the same time; a line must not be torn by another.
        self._lock = Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise UsageError(f"another run is writing {path}", hint="wait for its end") from error
        size = os.fstat(self._file).st_size  # a run that was killed may have left a part of a line
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def write(self, event: str, **fields: Any) -> None:
        safe = self._redactor.deep(json_of(fields))
        line = _dumped({"t": round(time.time(), 6), "event": event, **safe})
        data = line.encode("utf-8", "replace") + b"\n"
        with self._lock:
            if self._file < 0:
                return
            if self._torn:
                data = b"\n" + data  # the next line must not be lost to the part that came before it
            try:
                while data:  # a full disk takes a part first, and refuses the rest
                    data = data[os.write(self._file, data) :]
                    self._torn = bool(data)
            except OSError as error:
                raise InfraError(
                    f"cannot write to {self.path.name}: {error.strerror}", hint="free some space, or name another --out"
                ) from error

    def close(self) -> None:
        with self._lock:
            if self._file >= 0:
                os.fsync(self._file)
                os.close(self._file)
                self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def being_written(path: Path) -> bool:
    """Whether a run that goes on holds this journal, by the kernel's list of locks: to try the lock would get in the way of a run."""
    try:
        inode = path.stat().st_ino
        locks = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return False
    return any(" FLOCK " in line and f":{inode} " in line for line in locks.splitlines())


def read(path: Path) -> Recording:
    """The entries of a journal, however it ends. Raises `UsageError` where there is none."""
    reader = _Reader()
    try:
        with path.open("rb") as file:
            kept = tuple(reader.entries(file))
    except OSError as error:
        raise UsageError(
            f"no journal at {path}: {error.strerror}", hint="name a run's folder, such as reports/<scenario>/latest"
        ) from error
    return Recording(kept, cut=reader.last != LAST_EVENT, damaged=reader.damaged)


def head_of(recording: Recording, folder: Path, *, hint: str) -> Entry:
    """The line that began the run. Raises `UsageError` where there is none (then with `hint`), or several, or of another schema."""
    heads = list(recording.of("run-started"))
    if not heads:
        raise UsageError(f"the journal in {folder} does not hold the start of a run", hint=hint)
    if len(heads) > 1:
        # Their boots have the same numbers, so nobody can tell them apart, and a death would be counted for each.
        raise UsageError(
            f"the journal in {folder} holds {len(heads)} runs, or one of them several times",
            hint="give each a folder of its own: its lines go from one run-started up to the next",
        )
    schema = heads[0].get("schema", SCHEMA)
    if schema != SCHEMA:
        raise UsageError(
            f"the journal in {folder} has schema {schema!r}, and this is for schema {SCHEMA}",
            hint=f"vllm-repro {heads[0].get('harness_version') or 'of another release'} wrote it, and reads it",
        )
    return heads[0]


@contextlib.contextmanager
def legible(folder: Path) -> Iterator[None]:
    """While a journal from anywhere is taken in. Raises `UsageError` where it is not as this release writes one."""
    try:
        yield
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        lacking = f"it lacks {error}" if isinstance(error, KeyError) else f"{error}"
        raise UsageError(
            f"the journal in {folder} is not as this release, {__version__}, writes one: {lacking}",
            hint="its first line names the release that wrote it (harness_version), which reads it; if it is this one, and nobody has "
            "changed the file, please report it",
        ) from error


class _Reader:
    """Line by line. last: the event of the last whole line. damaged: lines that are none."""

    def __init__(self) -> None:
        self.last = ""
        self.damaged = 0

    def entries(self, lines: Iterable[bytes]) -> Iterator[Entry]:
        for line in lines:
            if not line.strip():
                continue
            try:
                fields = json.loads(line.decode("utf-8", "replace"))
                entry = Entry(float(fields.pop("t")), str(fields.pop("event")), fields)
            except (ValueError, KeyError, TypeError, AttributeError):
                self.damaged += 1
                continue
            self.last = entry.event
            yield entry
