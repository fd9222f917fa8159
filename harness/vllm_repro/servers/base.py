"""The seam behind which every vLLM stands, wherever it comes from.

A trial asks a `Server` to `start`, talks to its `base_url`, reads `log_path` while it grows, awaits `exited()` beside everything
else that it watches, and always calls `stop()`. Four kinds implement the seam (`process`, `docker`, `attach`, `rehearsal`); a
fifth, `lab`, is a `process` with a plugin and takes its place here without a change to the callers.

Rules that each kind keeps:

- `start()` returns as soon as the thing was launched, long before it is ready; whether it becomes ready is the watcher's business.
- A `start()` that raises has left nothing behind. It raises `Unsupported` (no such hardware, flag or platform) or `InfraError`
  (port taken, image missing, no engine), never anything else.
- `log_path` is written by the server itself or by a thread of its own, so nothing that was printed is lost with the harness.
- `stop()` may be called at any time and any number of times, ends only what this object started, and returns when it is gone.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm_repro.evidence import Evidence
from vllm_repro.servers.kinds import ServerKind


@dataclass(frozen=True)
class Exit:
    """How a server ended.

    code: exit status of the API server process or container; None where it cannot be known (an attached server).
    oom_killed: the kernel's out-of-memory killer took something in it.
    detail: one phrase for people, for example "exit status 0" or "container exited 137, OOM killed".
    at: `time.time()` when it was noticed.
    lost: the engine that would know (dockerd) does not answer, so nothing is known about the server.
    """

    code: int | None
    detail: str
    at: float
    oom_killed: bool = False
    lost: bool = False


@dataclass(frozen=True)
class Replaced:
    """One name of a release that does not run as it was written. file: below the folder of packages. effect: on the bug."""

    name: str
    file: str
    sha256: str
    why: str
    effect: str


@dataclass(frozen=True)
class Patched:
    """A file of a release that was changed for a trial: its name below the folder of packages, and its hash as the server found it.

    untried: changed functions of it in whose place something else runs. inside: its path in a running container, where a program that
    was run in there read the same hash; empty elsewhere.
    """

    file: str
    sha256: str
    untried: tuple[str, ...] = ()
    inside: str = ""


@dataclass(frozen=True)
class RankFacts:
    """A further node of the server: what was run for it."""

    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    pid: int | None = None
    container_id: str | None = None


@dataclass(frozen=True)
class ServerFacts:
    """What was really run, for journal and report. `argv` is the whole command; `env` only what was set on top."""

    kind: ServerKind
    evidence: Evidence
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    image: str | None = None
    digest: str | None = None
    pid: int | None = None
    container_id: str | None = None
    replaced: tuple[Replaced, ...] = ()
    patched: tuple[Patched, ...] = ()
    ranks: tuple[RankFacts, ...] = ()


class Server(ABC):
    """One server for one trial; see the rules at the head of this module."""

    base_url: str
    log_path: Path | None
    """Where its output grows; None where the output of an attached server cannot be found."""

    @abstractmethod
    async def start(self) -> ServerFacts:
        """Launches it. Raises `Unsupported` or `InfraError`, and then nothing is left behind."""

    @property
    def rank_logs(self) -> tuple[Path, ...]:
        """Where the output of further nodes grows, by rank from 1."""
        return ()

    async def rank_exited(self) -> tuple[int, Exit]:
        """The rank of the first further node that ended, and how; never returns where there is none."""
        never: asyncio.Future[tuple[int, Exit]] = asyncio.get_running_loop().create_future()
        return await never

    async def outlasting(self, seconds: float) -> tuple[int, ...]:
        """The ranks of further nodes whose server is still there after so long; waits only for those that are."""
        return ()

    def booted(self, facts: ServerFacts, *, ready: bool) -> ServerFacts:
        """`facts` with what only the booted server could tell. Called when it is ready, or will not be. Raises as `start` does."""
        return facts

    @abstractmethod
    async def exited(self) -> Exit:
        """Returns when the server has ended, for whatever reason. Safe to cancel and to call again."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends it, politely first, and returns when it and its children are gone."""

    def stranger(self) -> str:
        """Who answers at `base_url` in its place, as a phrase; empty where that is nobody, or cannot be seen. May take a moment."""
        return ""

    def processes(self) -> tuple[int, ...]:
        """Pids that belong to it now, the API server first; empty where they cannot be seen."""
        return ()
