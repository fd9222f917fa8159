"""Processes forked from a server that has imported torch: vLLM then imports in 1 s instead of 7 s.

There is a server for each interpreter and environment. The last two that were used stay, until this
process exits.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

_PROGRAM = Path(__file__).resolve().parent / "program" / "fork_server.py"
_MOST = 2
_PER_PROCESS = ("PYTHONPATH", "REPRO_PATCHED", "REPRO_PROBE")
"""Variables that nothing reads before the fork."""


class Forked:
    """A process of a fork server, with those members of `Popen` that `Driver` uses.

    stdin, stdout: our ends of its pipes. report: the pipe of its id and exit status; creating the
    object waits for the id. pid: None if the process did not start.
    """

    def __init__(self, stdin: int, stdout: int, report: int) -> None:
        self.stdin, self.stdout = os.fdopen(stdin, "wb"), os.fdopen(stdout, "rb", buffering=0)
        self._report = os.fdopen(report, "rb", buffering=0)
        self._status: int | None = None
        self.pid = self._read_number()

    def wait(self, timeout: float | None = None) -> int:
        """Wait like `Popen.wait` and return the exit status; -9 if none was reported."""
        if self._status is None:
            if not select.select([self._report], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            status = self._read_number()
            self._status = -signal.SIGKILL if status is None else status
            self._report.close()
        return self._status

    def kill(self) -> None:
        """Send SIGKILL unless the process has ended."""
        if self._status is None and self.pid and not select.select([self._report], [], [], 0)[0]:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _read_number(self) -> int | None:
        """Read the next line of the report, an id or exit status; wait for it. None at its end."""
        line = self._report.readline()
        return int(line) if line else None


def fork(python: Path, module: str, *, env: Mapping[str, str], errors: IO[bytes]) -> Forked:
    """Run `python -m module` in a process forked from a server, which starts on first use.

    If more than two servers run, the least recently used one is stopped. errors: log for the
    process's standard error.
    """
    variables = {name: env[name] for name in _PER_PROCESS if name in env}
    shared = {name: value for name, value in env.items() if name not in variables}
    key = json.dumps([str(python), shared], sort_keys=True)
    with _lock:
        if key in _servers and not _servers[key].runs():
            _servers.pop(key).close()
        _servers[key] = server = _servers.pop(key, None) or _Server(python, shared, errors)
        while len(_servers) > _MOST:
            _servers.pop(next(iter(_servers))).close()
    stdin, stdin_ours = os.pipe()
    stdout_ours, stdout = os.pipe()
    report_ours, report = os.pipe()
    start = {"module": module, "env": variables, "cwd": str(Path.cwd())}
    try:
        server.send(start, [stdin, stdout, errors.fileno(), report])
    finally:
        for descriptor in (stdin, stdout, report):
            os.close(descriptor)
    return Forked(stdin_ours, stdout_ours, report_ours)


class _Server:
    """A fork server process for one interpreter. errors: log of the process it was started for."""

    def __init__(self, python: Path, env: Mapping[str, str], errors: IO[bytes]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python, _PROGRAM, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env=env,
                pass_fds=[theirs.fileno()],
            )

    def runs(self) -> bool:
        """Return True if the server process has not exited."""
        return self._process.poll() is None

    def send(self, start: Mapping[str, object], descriptors: list[int]) -> None:
        """Ask the server to fork; do nothing if it has died.

        start: module, variables and folder. descriptors: of standard input, output and error, and
        of the report.
        """
        with suppress(OSError):  # it died; the end of the pipes shows that
            socket.send_fds(self._socket, [json.dumps(start).encode()], descriptors)

    def close(self) -> None:
        """Stop the server, also while it imports, and wait for its exit. Its forks live on."""
        self._socket.close()
        self._process.terminate()
        self._process.wait()


_servers: dict[str, _Server] = {}
_lock = threading.Lock()


@atexit.register
def _close() -> None:
    """Stop all fork servers when this process exits."""
    while _servers:
        _servers.popitem()[1].close()
