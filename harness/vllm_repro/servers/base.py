"""`Server`: the interface of every kind of server.

A trial calls `start`, sends requests to `base_url`, follows `log_path`, awaits `exited()`, and
always calls `stop()`. Rules for each kind:

- `start()` returns when the server is launched, long before it is ready. If it raises, it leaves
  nothing behind. It raises only `Unsupported` (hardware, flag or platform) or `InfraError` (port
  taken, image missing, no Docker Engine).
- The server or one of its threads writes `log_path`.
- `stop()` may be called at any time and again. It ends only what this object started, and returns
  when that has exited.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.witness import Patched, witnessed
from vllm_repro_diagnosis.evidence import Evidence


@dataclass(frozen=True, kw_only=True)
class Exit:
    """Exit of a server: status, reason in words, and when it was noticed."""

    # exit status of the API server's process or container; None if unknown
    code: int | None
    # a phrase, such as "container exited 137, OOM killed"
    detail: str
    # `time.time()` when it was noticed
    at: float
    # the kernel killed a process of the server for memory
    oom_killed: bool = False
    # dockerd or Ray lost the server, so nothing is known about it
    lost: bool = False


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A name in vLLM's code, such as a function, that the lab replaces on a CPU, and why."""

    name: str
    # path below site-packages
    file: str
    sha256: str
    why: str
    # effect on the bug
    effect: str


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """Command and process of a server, for journal and report."""

    kind: ServerKind
    evidence: Evidence
    # of its node, for a server over several
    rank: int = 0
    argv: tuple[str, ...]
    # only the variables that were set for this server
    env: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None
    digest: str | None = None
    # the vLLM as the user named it, if it is no release
    source: str | None = None
    # release of its compiled parts, if they come from another one
    compiled: str | None = None
    pid: int | None = None
    container_id: str | None = None
    replaced: tuple[Replaced, ...] = ()
    patched: tuple[Patched, ...] = ()
    # those of the other nodes of its server, by rank from 1
    ranks: tuple[ServerFacts, ...] = ()


class Server(ABC):
    """Base of every kind of server; an object serves one trial. The module has the rules."""

    base_url: str
    """Its URL, without `/v1`."""
    log_path: Path | None
    """Its growing log; None if the log of an attached server was not found."""
    patched: Mapping[str, str] = MappingProxyType({})
    """The sha256 of each patched file of vLLM that it should run, by its name below
    site-packages."""

    @abstractmethod
    async def start(self) -> ServerFacts:
        """Launch the server and return its command and process; do not wait until it is ready.

        Raises `Unsupported` or `InfraError`.
        """

    @property
    def rank_logs(self) -> tuple[Path, ...]:
        """Return the log files of a multi-node server's other nodes, by rank from 1."""
        return ()

    async def rank_exited(self) -> tuple[int, Exit]:
        """Wait until a node after the first ends, and return its rank and how it ended.

        Wait forever if there are no other nodes. May be cancelled and called again.
        """
        never: asyncio.Future[tuple[int, Exit]] = asyncio.get_running_loop().create_future()
        return await never

    async def surviving_ranks(self, seconds: float) -> tuple[int, ...]:
        """Wait `seconds`, and return the ranks of the nodes after the first that still run.

        Return early once all of them have ended.
        """
        return ()

    def booted(self, facts: ServerFacts, *, ready: bool) -> ServerFacts:
        """Return `facts` with those known only after the boot, such as the patched files in use.

        ready: False if the boot failed. Raises like `start`, and `InfraError` if the log shows that
        another file runs in place of a patched one.
        """
        if not self.patched or self.log_path is None:
            return facts
        log = self.log_path.read_text(encoding="utf-8", errors="replace")
        return replace(facts, patched=witnessed(log, self.patched, ready=ready))

    @abstractmethod
    async def exited(self) -> Exit:
        """Wait until the server has ended, and return how. May be cancelled and called again."""

    @abstractmethod
    async def stop(self) -> None:
        """End the server with SIGTERM, then SIGKILL; return when it and its children are gone.

        A server that this object did not start keeps running.
        """

    def other_listener(self) -> str:
        """Return a phrase for another process that listens at `base_url`; empty if none is seen."""
        return ""

    def processes(self) -> tuple[int, ...]:
        """Return the server's pids, the API server first; empty if they cannot be seen."""
        return ()
