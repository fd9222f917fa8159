"""Processes that this package started, and the records by which a later run finds those that a killed one left.

A server is started in a session of its own (`setsid`), so its process group, EngineCore and workers included, can be told from all
others whatever their names become; vLLM renames its processes, which also wipes their environment from /proc. The session's id is
written to a record by the child itself, between fork and exec, so there is no moment at which a SIGKILL of the harness leaves a
server that no record names.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from vllm_repro.errors import InfraError
from vllm_repro.host.owner import Owner, is_alive, this_owner

__all__ = ["LeftProcess", "Started", "list_left", "remove_left", "session_members", "start", "state_folder"]


def state_folder() -> Path:
    """Where records live: `$XDG_STATE_HOME/vllm-repro/processes`."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "vllm-repro" / "processes"


def session_members(session: int) -> list[psutil.Process]:
    """The living processes of a session, its leader first."""
    found: list[psutil.Process] = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # ended since it was listed
            if os.getsid(pid) == session:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
    return sorted(found, key=lambda process: process.pid != session)


@dataclass(frozen=True)
class LeftProcess:
    """What a killed run left: a session with living members, or just a record. log: device and inode of the server's output."""

    record: Path
    session: int | None
    command: str
    pids: tuple[int, ...]
    log: tuple[int, int] | None = None


class Started:
    """A running session. `popen` is its leader; `end` ends all of it and forgets the record."""

    def __init__(self, popen: subprocess.Popen[bytes], record: Path) -> None:
        self.popen = popen
        self.record = record
        self.session = popen.pid

    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in session_members(self.session))

    def end(self, grace: float = 15.0, *, poll: Callable[[float], None] = time.sleep) -> None:
        """SIGTERM to the leader, then SIGKILL to whatever of the session is left after `grace` seconds; returns when all are gone."""
        if self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # ended by itself just now
                self.popen.terminate()
        deadline = time.monotonic() + grace
        while self.popen.poll() is None and time.monotonic() < deadline:
            poll(0.02)
        # Workers outlive their API server by some seconds, and hold memory meanwhile.
        deadline = min(deadline, time.monotonic() + 5.0)
        while session_members(self.session) and time.monotonic() < deadline:
            poll(0.05)
        _kill_session(self.session)
        self.popen.wait()
        _forget(self.record)


def _forget(record: Path) -> None:
    for suffix in (".new", ".pid", ".json"):
        record.with_suffix(suffix).unlink(missing_ok=True)


def _shared_memory(members: Sequence[psutil.Process]) -> set[Path]:
    """The /dev/shm segments of Python's multiprocessing that these processes map: a killed process does not unlink its own."""
    segments: set[Path] = set()
    for process in members:
        with contextlib.suppress(psutil.Error, OSError):  # one that ended maps nothing
            segments |= {
                Path(region.path) for region in process.memory_maps() if region.path.startswith("/dev/shm/psm_")
            }
    return segments


def _kill_session(session: int) -> None:
    members = session_members(session)
    segments = _shared_memory(members)
    for _ in range(50):
        for process in members:
            with contextlib.suppress(psutil.Error):  # one that ended needs none
                process.kill()
        psutil.wait_procs(members, timeout=1.0)
        members = session_members(session)
        if not members:
            break
    for segment in segments:
        segment.unlink(missing_ok=True)


def start(argv: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path | None = None) -> Started:
    """Starts `argv` in a session of its own, both outputs appended to `log`. Raises `InfraError` where it cannot be started."""
    folder = state_folder()
    record = folder / f"{uuid.uuid4().hex}.json"
    pid_file = record.with_suffix(".pid")
    try:
        with log.open("ab") as output, _signing_in(pid_file) as sign_in:
            made = os.fstat(output.fileno())
            intent = {
                "owner": asdict(this_owner()),
                "command": " ".join(argv)[:500],
                "started": time.time(),
                "log": [made.st_dev, made.st_ino],
            }
            with _recording():
                record.write_text(json.dumps(intent), encoding="utf-8")
            popen = subprocess.Popen(
                list(argv),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                start_new_session=True,
                preexec_fn=sign_in,
            )
    except (InfraError, OSError, subprocess.SubprocessError) as error:
        with contextlib.suppress(OSError):  # the start that failed is what has to be told
            record.unlink(missing_ok=True)
            pid_file.unlink(missing_ok=True)
        if isinstance(error, InfraError):
            raise
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InfraError(
            f"cannot start {argv[0]}: {said}", hint="vllm-repro doctor shows which servers can run here"
        ) from error
    # Where the disk is full the child's own file goes on naming the session: the server runs, and must be handed over.
    with contextlib.suppress(OSError):
        fresh = record.with_suffix(".new")
        fresh.write_text(json.dumps({**intent, "session": popen.pid}), encoding="utf-8")
        fresh.replace(record)
        pid_file.unlink(missing_ok=True)
    return Started(popen, record)


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Raises `InfraError` where a server's record cannot be written: without one a later run could not find it, so it is not started."""
    try:
        yield
    except OSError as error:
        raise InfraError(
            f"cannot write to {state_folder()}, where the record of each server is kept: {error.strerror}",
            hint="free some space there, or set XDG_STATE_HOME to a folder that can be written to",
        ) from error


@contextlib.contextmanager
def _signing_in(pid_file: Path) -> Iterator[Callable[[], None]]:
    """What the child calls to write its pid down. Raises `InfraError` where the record's folder cannot be written to."""
    with _recording():
        pid_file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(pid_file, os.O_WRONLY | os.O_CREAT, 0o600)

    def sign_in() -> None:
        # Runs in the child between fork and exec, where only plain system calls are safe.
        os.write(descriptor, b"%d" % os.getpid())

    try:
        yield sign_in
    finally:
        os.close(descriptor)


def _records() -> Iterator[tuple[Owner, LeftProcess]]:
    """Every record there is, with the pids still to be found."""
    for record in sorted(state_folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # removed meanwhile, or cut by a full disk
            data = json.loads(record.read_text(encoding="utf-8"))
            session = data.get("session")
            if session is None:
                with contextlib.suppress(OSError, ValueError):  # killed before its child could write it
                    session = int(record.with_suffix(".pid").read_text())
            device, inode = data.get("log") or (0, 0)
            yield Owner(**data["owner"]), LeftProcess(record, session, str(data["command"]), (), (device, inode))


def _writes_to(pid: int, log: tuple[int, int]) -> bool:
    """Whether the process has the file as its standard output or error, also where it was deleted since."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # gone, or not ours to see
            found = Path(f"/proc/{pid}/fd/{descriptor}").stat()
            if (found.st_dev, found.st_ino) == log:
                return True
    return False


def _members_of(left: LeftProcess) -> tuple[int, ...]:
    """The living processes of a record's session; none where the session's number belongs to somebody else by now.

    A number is not given out again while a member lives, so one process that writes to our server's log proves that all are ours.
    When the last one began proves nothing: whoever has the number now began later still.
    """
    if not left.session or left.log is None:
        return ()
    members = tuple(process.pid for process in session_members(left.session))
    return members if any(_writes_to(pid, left.log) for pid in members) else ()


def list_left() -> list[LeftProcess]:
    """What runs that no longer live have left on this host."""
    here = this_owner()
    return [
        # No process outlives a reboot, and after one the numbers are those of others.
        replace(left, pids=_members_of(left) if owner.boot == here.boot else ())
        for owner, left in _records()
        if not is_alive(owner)
    ]


def remove_left(left: Sequence[LeftProcess]) -> None:
    """Ends what `list_left` found and forgets the records."""
    for item in left:
        for pid in item.pids:
            with contextlib.suppress(OSError):  # gone; one that may not be ended is seen below
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 3.0
        while (alive := item.pids and _members_of(item)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if alive and item.session:
            _kill_session(item.session)
        _forget(item.record)
