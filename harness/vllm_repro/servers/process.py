"""A local vLLM as a process in a session of its own, and the rehearsal engine, which is one too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from vllm_repro.command.container import looks_secret
from vllm_repro.errors import InfraError
from vllm_repro.host.processes import Started, start
from vllm_repro.servers.base import Evidence, Exit, Server, ServerFacts, ServerKind
from vllm_repro.servers.witness import witnessed

__all__ = ["ProcessServer", "check_port", "free_port"]

LOOPBACK = "127.0.0.1"


def free_port() -> int:
    """A loopback port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Raises `InfraError` where something listens already: a dying old server still answers 200 for the new one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise InfraError(
                f"port {port} on {LOOPBACK} is in use ({error.strerror})",
                hint="name another with --port, or leave it out and a free one is taken",
            ) from error


def listeners(port: int) -> set[int]:
    """The pids on this host that listen on a TCP port, as far as they are ours to see."""
    with contextlib.suppress(psutil.Error, OSError):  # not ours to see
        return {
            connection.pid
            for connection in psutil.net_connections(kind="tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if connection.pid is not None
        }
    return set()


def _steers_vllm(name: str) -> bool:
    return name.startswith("VLLM_") and not name.startswith("VLLM_REPRO_")


class ProcessServer(Server):
    """Runs `argv`, which must make it listen on `port`.

    patched: sha256 of each file of vLLM's source that was changed for it, by its name below the folder of packages. env: what is set on
    top of the caller's environment. Recorded is that and what of the caller's vLLM reads, without secrets. The
    caller's PYTHONOPTIMIZE is not passed on: it takes the assertions out of vLLM, of which some of these engines die.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        port: int,
        log: Path,
        env: Mapping[str, str],
        kind: ServerKind,
        evidence: Evidence,
        grace: float = 15.0,
        patched: Mapping[str, str] | None = None,
    ) -> None:
        self.argv = tuple(argv)
        self.port = port
        self.log_path: Path = log
        self.env = dict(env)
        self.kind = kind
        self.evidence = evidence
        self.grace = grace
        self.patched = dict(patched or {})
        self.base_url = f"http://{LOOPBACK}:{port}"
        self._started: Started | None = None

    async def start(self) -> ServerFacts:
        check_port(self.port)
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONOPTIMIZE"}
        self._started = start(self.argv, inherited | self.env, self.log_path)
        told = {name: value for name, value in inherited.items() if _steers_vllm(name)} | self.env
        return ServerFacts(
            self.kind,
            self.evidence,
            self.argv,
            {key: value for key, value in told.items() if not looks_secret(key)},
            pid=self._started.popen.pid,
        )

    def booted(self, facts: ServerFacts, *, ready: bool) -> ServerFacts:
        if not self.patched:
            return facts
        log = self.log_path.read_text(encoding="utf-8", errors="replace")
        return replace(facts, patched=witnessed(log, self.patched, ready=ready))

    async def exited(self) -> Exit:
        if self._started is None:
            raise InfraError("the server was never started")
        popen: subprocess.Popen[bytes] = self._started.popen
        while popen.poll() is None:
            await asyncio.sleep(0.02)
        code = popen.returncode
        how = f"exit status {code}" if code >= 0 else f"ended by signal {-code}"
        return Exit(code, f"the server's process is gone, {how}", time.time())

    async def stop(self) -> None:
        if self._started is None:
            return
        # Shielded: a run that is being cancelled must still see the server go.
        await asyncio.shield(asyncio.to_thread(self._started.end, self.grace))

    def stranger(self) -> str:
        # A port that was free at the start may be somebody else's by the time that a slow boot comes to bind it.
        own = set(self.processes())
        listening = listeners(self.port)
        return "" if not listening or own & listening else f"pid {', '.join(map(str, sorted(listening)))}"

    def processes(self) -> tuple[int, ...]:
        return self._started.pids() if self._started else ()
