"""Journal: the append-only record of a run, one JSON object per line.

It is the source of every report. A line holds `t` (epoch seconds), `event` and the fields of that
event. A killed run leaves a journal that ends early, possibly in the middle of a line. Secrets are
replaced before a line is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Self

import msgspec

from vllm_repro import __version__
from vllm_repro.errors import HarnessBug, InfraError, UsageError
from vllm_repro.journal.redact import Redactor

SCHEMA = 1
"""Version of the format. It rises with changes that an older release would misread."""

LAST_EVENT = "run-ended"


@dataclass(frozen=True)
class Entry:
    """One line of a journal."""

    # seconds since the epoch
    t: float
    event: str
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a field, or `default`."""
        return self.fields.get(name, default)


@dataclass(frozen=True)
class Recording:
    """Content of a journal: its entries, and whether it is complete."""

    entries: tuple[Entry, ...]
    # its last entry is not `run-ended`: the run was killed, or is still running
    cut: bool
    # number of unreadable, doubled or lost lines
    damaged: int = 0

    def of(self, event: str) -> Iterator[Entry]:
        """Return the entries of one event, in order."""
        return (entry for entry in self.entries if entry.event == event)

    def first(self, event: str) -> Entry | None:
        """Return the first entry of an event, or None."""
        return next(self.of(event), None)

    @property
    def end(self) -> Entry | None:
        """Return the `run-ended` entry, or None if the journal is cut."""
        return None if self.cut else self.entries[-1]


def json_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields as JSON data, the way a journal holds them, not redacted.

    Raises `TypeError` for a value that has no JSON form.
    """
    plain: dict[str, Any] = msgspec.to_builtins(fields, str_keys=True, enc_hook=_plain)
    return plain


def _plain(value: Any) -> Any:
    """Return a path as a text and a mapping as a dict. Raises `TypeError` for other types."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be written to the journal")


class Journal:
    """Writer that appends events to the journal file `path`, without secrets.

    Raises `UsageError` if another process writes the same journal.

    Each line reaches the kernel before `write` returns, so a killed process loses none. The default
    redactor removes secrets and keeps private names, because later commands need the paths.
    """

    def __init__(self, path: Path, redactor: Redactor | None = None) -> None:
        self.path = path
        self._redactor = redactor or Redactor(names=False)
        # Several threads write; their lines must not mix.
        self._lock = Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise UsageError(
                f"another run is writing {path}", hint="wait until it has finished"
            ) from error
        size = os.fstat(self._file).st_size  # a killed run may leave a partial line
        self._torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def write(self, event: str, **fields: Any) -> None:
        """Append one event with the time and its redacted fields. Do nothing after `close`.

        Raises `InfraError` if the file cannot be written, for example on a full disk. At the end of
        a trial or run, raises `HarnessBug` if the file was removed.
        """
        safe = self._redactor.deep(json_of(fields))
        line = json.dumps({"t": round(time.time(), 6), "event": event, **safe}, ensure_ascii=False)
        unwritten = line.encode("utf-8", "replace") + b"\n"
        with self._lock:
            if self._file < 0:
                return
            if self._torn:
                unwritten = b"\n" + unwritten  # keep the new line apart from the partial one
            try:
                while unwritten:  # a full disk may accept only a part
                    unwritten = unwritten[os.write(self._file, unwritten) :]
                    self._torn = bool(unwritten)
                if event in ("trial-ended", LAST_EVENT):
                    os.fsync(self._file)  # a power failure must not lose a boot that took minutes
                    if not os.fstat(self._file).st_nlink:
                        text = (
                            f"{self.path.name} was removed while the run wrote it, so nothing can"
                            " be reported"
                        )
                        raise HarnessBug(
                            text, hint="leave a run's folder alone until it ends, and run it again"
                        )
            except OSError as error:
                raise InfraError(
                    f"cannot write to {self.path.name}: {error.strerror}",
                    hint="free some space, or name another --out",
                ) from error

    def close(self) -> None:
        """Flush the journal to disk, close it, and let another process write it."""
        with self._lock:
            if self._file >= 0:
                os.fsync(self._file)
                os.close(self._file)
                self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path) -> Recording:
    """Return the entries of a journal. Raises `UsageError` if the file cannot be read.

    Unreadable lines and doubled `trial-ended` lines are left out, and counted in `damaged`.
    """
    entries: list[Entry] = []
    damaged = 0
    ended: set[bytes] = set()  # a doubled line would count a crash twice
    try:
        with path.open("rb") as file:
            for line in filter(bytes.strip, file):
                if b'"trial-ended"' in line:
                    if line in ended:
                        damaged += 1
                        continue
                    ended.add(line)
                try:
                    fields = json.loads(line.decode("utf-8", "replace"))
                    entries.append(Entry(float(fields.pop("t")), str(fields.pop("event")), fields))
                except (ValueError, KeyError, TypeError, AttributeError):
                    damaged += 1
    except OSError as error:
        raise UsageError(
            f"no journal at {path}: {error.strerror}",
            hint="name a run's folder, such as reports/<scenario>/latest",
        ) from None
    cut = not entries or entries[-1].event != LAST_EVENT
    if not cut and not entries[-1].get("interrupted"):
        events = [entry.event for entry in entries]
        unended = events.count("trial-started") - events.count("trial-ended")
        # lines are lost: a kill leaves only one trial without its end
        damaged += max(0, unended - events.count("run-resumed"))
    return Recording(tuple(entries), cut=cut, damaged=damaged)


def head_of(recording: Recording, folder: Path, *, hint: str) -> Entry:
    """Return the `run-started` entry of a journal, which describes the run.

    Raises `UsageError` if it is missing (with `hint`), repeated, or of another schema.
    """
    heads = list(recording.of("run-started"))
    if not heads:
        raise UsageError(f"the journal in {folder} does not hold the start of a run", hint=hint)
    if len(heads) > 1:
        # Trials of both have the same numbers, so crashes would be counted twice.
        raise UsageError(
            f"the journal in {folder} holds {len(heads)} runs, or one of them several times",
            hint=(
                "move each run to its own folder: a run goes from one run-started line to the next"
            ),
        )
    schema = heads[0].get("schema", SCHEMA)
    if schema != SCHEMA:
        raise UsageError(
            f"the journal in {folder} has schema {schema!r}, and this release reads schema"
            f" {SCHEMA}",
            hint=(
                f"vllm-repro {heads[0].get('harness_version') or 'of another release'} wrote it and"
                " can read it"
            ),
        )
    return heads[0]


@contextlib.contextmanager
def legible(folder: Path) -> Iterator[None]:
    """Raise `UsageError` if the block meets a journal that is not in the format of this release."""
    try:
        yield
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        problem = f"it lacks {error}" if isinstance(error, KeyError) else f"{error}"
        raise UsageError(
            f"the journal in {folder} is not in the format of this release, {__version__}:"
            f" {problem}",
            hint=(
                "read it with the release that its first line names (harness_version). If it is"
                " this one and nobody edited the file, please report it"
            ),
        ) from error
