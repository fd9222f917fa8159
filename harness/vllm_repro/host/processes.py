"""Sessions of processes that this package starts.

A server runs in a new session (`setsid`), which identifies its processes: vLLM renames them and
clears their environment. The sessions of a killed harness are found by the server's log, to which a
process of each writes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import psutil

from vllm_repro.errors import InfraError
from vllm_repro.host.lease import Lease


def is_alive(pid: int) -> bool:
    """Return True if a process runs; False if it is gone or a zombie."""
    with contextlib.suppress(psutil.Error):  # gone
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def session_members(session: int) -> list[psutil.Process]:
    """Return the living processes of a session, its leader first."""
    members: list[psutil.Process] = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # ended since it was listed
            if os.getsid(pid) == session:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
    return sorted(members, key=lambda process: process.pid != session)


_COMPILED_CODE = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
"""Folder where torch keeps compiled code between boots.

Torch's default is the temporary folder, which a server here has for one boot.
"""


class Session:
    """A process session (`setsid`) with a server in it. `popen` is its leader.

    The leader is not reaped before the end: its id is that of the session, and free ids are used
    again.
    """

    def __init__(self, popen: subprocess.Popen[bytes], lease: Lease) -> None:
        self.popen = popen
        self._lease = lease
        self._ended = False
        self.id = popen.pid

    def exit_code(self) -> int | None:
        """Return the leader's exit status, negative for a signal; None while it runs."""
        if self.popen.returncode is not None:
            return self.popen.returncode
        try:
            end = os.waitid(os.P_PID, self.id, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # `end_sessions` of this process has reaped it
            return self.popen.poll()
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def pids(self) -> tuple[int, ...]:
        """Return the pids of the session, its leader first; empty after `end`."""
        return () if self._ended else tuple(process.pid for process in session_members(self.id))

    def end(self, grace: float = 15.0) -> None:
        """Send SIGTERM to the leader and, after `grace` seconds, SIGKILL to all that are left.

        If the leader exits earlier, the others have at most 5 s. Return when all are gone, their
        shared memory is removed and the lease is released. May be called again.
        """
        if self._ended:
            return
        if self.exit_code() is None:
            os.kill(self.id, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while self.exit_code() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        # Workers outlive their API server by some seconds.
        deadline = min(deadline, time.monotonic() + 5.0)
        while session_members(self.id) and time.monotonic() < deadline:
            time.sleep(0.05)
        _kill(self.id)
        self._ended = True
        self.popen.wait()
        self._lease.release()


def _kill(session: int) -> None:
    """Kill all processes of a session with SIGKILL, and remove their shared memory.

    Wait until they are gone, for at most 50 s.
    """
    members = session_members(session)
    segments = _shared_memory(members)
    for attempt in range(50):
        for process in members:
            with contextlib.suppress(psutil.Error):  # ended by itself
                # Python's tracker removes semaphores and shared memory once all others are gone.
                # Their names are nowhere else.
                if attempt > 1 or "multiprocessing.resource_tracker" not in " ".join(
                    process.cmdline()
                ):
                    process.kill()
        psutil.wait_procs(members, timeout=1.0)
        members = session_members(session)
        if not members:
            break
    for segment in segments:
        segment.unlink(missing_ok=True)


def _shared_memory(members: Sequence[psutil.Process]) -> set[Path]:
    """Return the shared-memory files of Python's multiprocessing that `members` map.

    A killed process does not unlink them.
    """
    segments: set[Path] = set()
    for process in members:
        with contextlib.suppress(psutil.Error, OSError):  # ended by itself
            segments |= {
                Path(region.path)
                for region in process.memory_maps()
                if region.path.startswith("/dev/shm/psm_")
            }
    return segments


def start(argv: Sequence[str], env: Mapping[str, str], log: Path) -> Session:
    """Start `argv` in a new session with a lease, with both outputs appended to `log`.

    Raises `InfraError` if it cannot be started.

    env: all its variables; TMPDIR is replaced by a new folder, because vLLM leaves sockets there.
    The lease removes that folder.
    """
    lease = None
    try:
        with log.open("ab") as output:
            file = os.fstat(output.fileno())
            lease = Lease(" ".join(argv)[:500], (file.st_dev, file.st_ino))
            Path(lease.temporary).mkdir(0o700)
            # setproctitle fails if the first variable changes later, as torch changes its own.
            environment = {**env, "TMPDIR": lease.temporary}
            environment.setdefault("TORCHINDUCTOR_CACHE_DIR", _COMPILED_CODE)
            popen = subprocess.Popen(
                list(argv),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        if lease is not None:
            lease.release()
        raise InfraError(
            f"cannot start {argv[0]}: {error.strerror}",
            hint="vllm-repro doctor shows which servers can run here",
        ) from error
    return Session(popen, lease)


def sessions_writing_to(log: tuple[int, int]) -> set[int]:
    """Return the ids of the sessions with a process that writes to the file `log`.

    log: its device and inode; the file may be deleted. Only standard output and standard error
    count.
    """
    sessions = set()
    for pid in psutil.pids():
        for descriptor in (1, 2):
            with contextlib.suppress(OSError):  # ended, or not ours to see
                file = Path(f"/proc/{pid}/fd/{descriptor}").stat()
                if (file.st_dev, file.st_ino) == log:
                    sessions.add(os.getsid(pid))
    return sessions


def end_sessions(sessions: Collection[int], grace: float = 3.0) -> None:
    """Send SIGTERM to all processes of `sessions` and, after `grace` seconds, SIGKILL.

    Return when all are gone and their shared memory is removed.
    """
    members = [process for session in sessions for process in session_members(session)]
    # read now: after SIGTERM no process may map a segment that still exists
    segments = _shared_memory(members)
    for process in members:
        with contextlib.suppress(psutil.Error):  # ended by itself
            process.terminate()
    deadline = time.monotonic() + grace
    while any(map(session_members, sessions)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for session in sessions:
        _kill(session)
    for segment in segments:
        segment.unlink(missing_ok=True)
