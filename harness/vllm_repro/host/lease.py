"""Lease of a server: a file that this process keeps locked while it runs the server.

The kernel releases the lock when the process exits, also by SIGKILL. A server whose lease is free
is an orphan. A guard, a small separate process, then ends it. If the guard was killed too,
`vllm-repro clean` or the next run finds the lease.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import msgspec
import platformdirs

from vllm_repro.conversion import decode
from vllm_repro.errors import InfraError

# The kernel closes the pipe when the harness exits. Only then is the package imported, by a program
# that replaces this one. -P: nothing is imported from the working folder.
_GUARD = """
import os, sys
leases = set()
for line in sys.stdin:
    (leases.add if line[0] == "+" else leases.discard)(line[1:-1])
if leases:
    os.execv(sys.executable, [sys.executable, "-P", "-m", "vllm_repro.servers.orphans", *leases])
"""


@dataclass(frozen=True, kw_only=True)
class LeaseFacts:
    """Content of a lease file: which harness started which server, and its log."""

    # pid of the harness
    pid: int
    # working folder of the harness
    folder: str
    server: str
    # device and inode of a process's log; None for a container
    log: tuple[int, int] | None
    # folder for a process's temporary files; empty for a container
    temporary: str = ""


TEMPORARY = "vllm-repro-server-"
"""Begins the name of a program's temporary folder with the log of its server."""


class Lease:
    """Locked file by which a running server is found and ended if this process is killed.

    `Lease(…)` writes and locks the file and tells the guard process. `temporary` is a path for the
    server's files; the caller makes that folder.

    server: a few words for `clean`. log: device and inode of a process's log; None for a container,
    which has no `temporary`. Raises `InfraError` if the file cannot be written.
    """

    def __init__(self, server: str, log: tuple[int, int] | None = None) -> None:
        name = uuid.uuid4().hex
        # Short, because it holds sockets.
        self.temporary = str(Path(tempfile.gettempdir()) / f"vllm-repro-{name[:8]}") if log else ""
        facts = LeaseFacts(
            pid=os.getpid(),
            folder=_working_folder(),
            server=server,
            log=log,
            temporary=self.temporary,
        )
        self.path = lease_folder() / f"{_host()}-{name}"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("xb", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._file.write(msgspec.json.encode(facts))
            self._guard = _guard()
            self._tell_guard("+")
        except OSError as error:
            with contextlib.suppress(OSError):
                self.path.unlink()
            raise InfraError(
                f"cannot write to {lease_folder()}, where the lease of each server is kept:"
                f" {error.strerror}",
                hint=(
                    "free some space there, or set XDG_STATE_HOME to a folder that can be"
                    " written to"
                ),
            ) from error

    def free(self) -> None:
        """Unlock the lease, though the server may still run: `clean` or the guard ends it."""
        self._file.close()

    def release(self) -> None:
        """Remove the lease and the temporary files: the server is gone. May be called again."""
        remove_lease(self.path, self.temporary)
        self._file.close()
        with contextlib.suppress(OSError):  # the guard was killed
            self._tell_guard("-")

    def _tell_guard(self, sign: str) -> None:
        """Tell the guard process to watch this lease (`+`) or to forget it (`-`)."""
        assert self._guard.stdin is not None
        os.write(self._guard.stdin.fileno(), f"{sign}{self.path.name}\n".encode())


def remove_lease(path: Path, temporary: str) -> None:
    """Remove a lease file, and the server's temporary folder if it has one."""
    if temporary:
        shutil.rmtree(temporary, ignore_errors=True)
    path.unlink(missing_ok=True)


_guards: list[subprocess.Popen[bytes]] = []


def _guard() -> subprocess.Popen[bytes]:
    """Return the guard process, which ends the servers of the leases after this process exits.

    Start it if there is none, or if it was killed.
    """
    if not _guards or _guards[-1].poll() is not None:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C does not reach it
        )
        atexit.register(guard.communicate)
        _guards.append(guard)
    return _guards[-1]


def lease_folder() -> Path:
    """Return the folder of the leases: `$XDG_STATE_HOME/vllm-repro/leases` on Linux."""
    return platformdirs.user_state_path("vllm-repro", appauthor=False) / "leases"


def free_leases() -> dict[Path, LeaseFacts]:
    """Return the unlocked leases of this user on this host, {file: content}.

    Their harness has ended, or called `Lease.free`.
    """
    free = {}
    for path in sorted(lease_folder().glob(f"{_host()}-*")):
        # Held, removed meanwhile, or not written yet.
        with contextlib.suppress(OSError, msgspec.MsgspecError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            free[path] = decode(file.read(), LeaseFacts)
    return free


def _host() -> str:
    """Return an id of this host: several hosts may share a home folder, and so the leases.

    It is a hash of the host's name, because labels of containers are public.
    """
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


def _working_folder() -> str:
    """Return the path of the current folder; empty if it was deleted."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""
