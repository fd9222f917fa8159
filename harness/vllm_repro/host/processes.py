"""Sessions of processes that this package starts, and their records.

A server runs in a session of its own (`setsid`), which separates its processes from all others: vLLM renames them and wipes their
environment. The child writes the id of its session to a record between fork and exec, so a server without a record cannot exist.
By the records a guard or a later run finds the sessions whose owner was killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import platformdirs
import psutil

from vllm_repro.errors import InfraError
from vllm_repro.host.owner import Owner, is_gone, this_owner

__all__ = [
    "OrphanSession",
    "Session",
    "end_orphan_sessions",
    "orphan_sessions",
    "session_members",
    "start",
    "state_folder",
]


def state_folder() -> Path:
    """Return the folder of the records: `$XDG_STATE_HOME/vllm-repro/processes` on Linux."""
    return platformdirs.user_state_path("vllm-repro", appauthor=False) / "processes"


def session_members(session: int) -> list[psutil.Process]:
    """Return the living processes of a session, its leader first."""
    found: list[psutil.Process] = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # ended since it was listed
            if os.getsid(pid) == session:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return sorted(found, key=lambda process: process.pid != session)


class Session:
    """A running session. `popen` is its leader."""

    def __init__(self, popen: subprocess.Popen[bytes], record: Path) -> None:
        self.popen = popen
        self.record = record
        self.id = popen.pid

    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in session_members(self.id))

    def end(self, grace: float = 15.0) -> None:
        """Send SIGTERM to the leader and after `grace` seconds SIGKILL to all that are left; return when all are gone."""
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # ended by itself just now
                self.popen.terminate()
        deadline = time.monotonic() + grace
        while self.popen.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        # Workers outlive their API server by some seconds.
        deadline = min(deadline, time.monotonic() + 5.0)
        while session_members(self.id) and time.monotonic() < deadline:
            time.sleep(0.05)
        _kill(self.id)
        self.popen.wait()
        self.record.unlink(missing_ok=True)


def _kill(session: int) -> None:
    members = session_members(session)
    segments = _shared_memory(members)
    for _ in range(50):
        for process in members:
            with contextlib.suppress(psutil.Error):  # ended by itself
                process.kill()
        psutil.wait_procs(members, timeout=1.0)
        members = session_members(session)
        if not members:
            break
    for segment in segments:
        segment.unlink(missing_ok=True)


def _shared_memory(members: Sequence[psutil.Process]) -> set[Path]:
    """Return the segments of Python's multiprocessing that `members` map. A killed process does not unlink them."""
    segments: set[Path] = set()
    for process in members:
        with contextlib.suppress(psutil.Error, OSError):  # ended by itself
            segments |= {
                Path(region.path) for region in process.memory_maps() if region.path.startswith("/dev/shm/psm_")
            }
    return segments


@dataclass(frozen=True, kw_only=True)
class SessionRecord:
    """The first line of a record; the second is the id of the session. log: device and inode of the server's log."""

    owner: Owner
    command: str
    folder: str
    log: tuple[int, int]


def start(argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path | None = None) -> Session:
    """Start `argv` in a session of its own, with both outputs appended to `log`. Raises `InfraError`."""
    record = state_folder() / f"{uuid.uuid4().hex}.json"
    with contextlib.ExitStack() as files:
        try:
            output = files.enter_context(log.open("ab"))
            descriptor = _open_record(record, argv, os.fstat(output.fileno()))
            files.callback(os.close, descriptor)
            popen = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=lambda: _write_pid(descriptor),
            )
        except (InfraError, OSError, subprocess.SubprocessError) as error:
            with contextlib.suppress(OSError):  # the first error is the one to report
                record.unlink(missing_ok=True)
            if isinstance(error, InfraError):
                raise
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise InfraError(
                f"cannot start {argv[0]}: {why}", hint="vllm-repro doctor shows which servers can run here"
            ) from error
    return Session(popen, record)


def _write_pid(descriptor: int) -> None:
    """Write the second line of a record. Runs in the child between fork and exec, where only plain system calls are safe."""
    os.write(descriptor, b"%d" % os.getpid())


def _open_record(record: Path, argv: Sequence[str], log: os.stat_result) -> int:
    """Write the first line of a record and return its descriptor. Raises `InfraError`: a later run could not find the server."""
    first = SessionRecord(
        owner=this_owner(), command=" ".join(argv)[:500], folder=_working_folder(), log=(log.st_dev, log.st_ino)
    )
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, msgspec.json.encode(first) + b"\n")
    except OSError as error:
        raise InfraError(
            f"cannot write to {state_folder()}, where the record of each server is kept: {error.strerror}",
            hint="free some space there, or set XDG_STATE_HOME to a folder that can be written to",
        ) from error
    return descriptor


def _working_folder() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""


@dataclass(frozen=True, kw_only=True)
class OrphanSession:
    """A session whose owner is gone. pids: its living processes; empty if only the record is left."""

    path: Path
    record: SessionRecord
    session: int | None
    pids: tuple[int, ...]

    def __str__(self) -> str:
        owner = self.record.owner
        return f"process {', '.join(map(str, self.pids))}, started by pid {owner.pid} in {self.record.folder}: {self.record.command}"


def orphan_sessions() -> list[OrphanSession]:
    """Return the sessions of this user on this host whose owner is gone."""
    here = this_owner()
    found = []
    for path in sorted(state_folder().glob("*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):  # removed meanwhile, or damaged
            first, _, second = path.read_text(encoding="utf-8").partition("\n")
            record = msgspec.json.decode(first, type=SessionRecord)
            if is_gone(record.owner):
                session = int(second) if second.isdigit() else None
                # No process outlives a reboot, and after it the number may belong to others.
                pids = _members(session, record.log) if record.owner.boot == here.boot else ()
                found.append(OrphanSession(path=path, record=record, session=session, pids=pids))
    return found


def end_orphan_sessions(orphans: Sequence[OrphanSession]) -> None:
    """End the processes of `orphans` and remove their records."""
    for orphan in orphans:
        for pid in orphan.pids:
            with contextlib.suppress(OSError):  # ended by itself
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 3.0
        while (alive := orphan.pids and _members(orphan.session, orphan.record.log)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if alive and orphan.session:
            _kill(orphan.session)
        orphan.path.unlink(missing_ok=True)


def _members(session: int | None, log: tuple[int, int]) -> tuple[int, ...]:
    """Return the living processes of a session; empty if another session has its number now.

    The kernel does not reuse a session's number while a member lives. So one process that writes to our server's log proves that all
    are ours. Start times prove nothing: whoever has the number now began later still.
    """
    if not session:
        return ()
    members = tuple(process.pid for process in session_members(session))
    return members if any(_writes_to(pid, log) for pid in members) else ()


def _writes_to(pid: int, log: tuple[int, int]) -> bool:
    """Return True if the file is the standard output or error of the process, even if it was deleted since."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # ended, or not ours to see
            found = Path(f"/proc/{pid}/fd/{descriptor}").stat()
            if (found.st_dev, found.st_ino) == log:
                return True
    return False
