"""Nodes of one server on several nodes of a Ray cluster, for commands with `--nnodes`.

The scenario dsv4-tp2 has such a command.

`fleet` reserves the nodes of the cluster, and the run goes to the first of them. Its process starts
one task per further node and boot: `run_item` with a `Rank`, which prepares that node and starts
its `vllm serve`. The log of that process is sent back while it runs.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_repro import errors
from vllm_repro.errors import InfraError, ReproError
from vllm_repro.scenario.scenario import Arm
from vllm_repro.servers.base import Exit, Server, ServerFacts
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.multi_node import Meeting
from vllm_repro_cluster.fleet import ray_at
from vllm_repro_cluster.item import (
    ERROR,
    EXIT,
    NODE,
    OUTPUT,
    POLL_S,
    RANK_LOG,
    STARTED,
    Item,
    Rank,
    start_item,
)
from vllm_repro_diagnosis.evidence import Evidence

_BEGINS_IN_S = 120.0
"""Seconds to wait for a node. Ray may have to replace a lost one."""
_ENDS_IN_S = 60.0
_SETTLED_S, _SETTLES_IN_S = 0.5, 3.0
"""Seconds without a new chunk after which a log is complete, and the most to wait for that.

A cancelled task sends no more.
"""


class ClusterNodes:
    """The nodes that `fleet` reserved for the servers of a run.

    It fits `servers.multi_node.Nodes`.
    """

    def __init__(self, item: Item, say: Callable[[str], None]) -> None:
        """Connect this process to the cluster, then remove Ray's variables from its environment.

        say: called with lines of progress. Raises `UsageError` or `InfraError`.
        """
        self._ray, self._item, self._say = ray_at(item.cluster, item.address), item, say
        self.address = item.address
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]  # servers inherit the rest

    def prepare(self) -> list[str]:
        """Fetch what the servers need on each further node, and return these nodes' addresses.

        Wait for each. Raises `ReproError` if a node cannot be prepared.
        """
        return [self._prepare_node(rank) for rank in range(1, self._item.nodes)]

    def _prepare_node(self, rank: int) -> str:
        """Prepare the node of one rank, and return its address once it is done.

        Raises `ReproError` if it fails, and ends the node's task.
        """
        node = _Node(self._ray, self._item, Rank(rank=rank), None, self._say)
        node.begin()
        try:
            while not node.ended.wait(POLL_S):
                node.check()
            node.check()
        except ReproError:
            node.end()
            raise
        return node.address

    def server(self, arm: Arm, rank: int, meeting: Meeting, log: Path) -> Server:
        """Return the part of a server that runs on the node of a rank, not started yet."""
        return _Node(
            self._ray, self._item, Rank(rank=rank, arm=arm, meeting=meeting), log, self._say
        )


class _Node(Server):
    """The server of one further node. log: None if the node is only to be prepared."""

    def __init__(
        self, ray: Any, item: Item, rank: Rank, log: Path | None, say: Callable[[str], None]
    ) -> None:
        self.base_url = "http://127.0.0.1:0"
        self.log_path = log
        # why the node cannot do its part; None if it can
        self.refused: ReproError | None = None
        # set once the task has ended, and `_exit` with it
        self.ended = threading.Event()
        self._ray, self._rank, self._say = ray, rank.rank, say
        self._item = replace(item, rank=rank, resume="")
        self._started: dict[str, Any] | None = None
        self._exit: Exit | None = None
        self.address = ""
        """Address of the node; empty until it answers."""
        self._begun = self._heard = 0.0
        self._stream: Any = None

    def begin(self) -> None:
        """Start the task on the node, and a thread that reads what it sends."""
        if self.log_path is not None:
            self.log_path.touch()
        self._begun = self._heard = time.monotonic()
        self._stream = start_item(self._ray, self._item, self._rank, {})
        threading.Thread(target=self._read, daemon=True).start()

    def check(self) -> None:
        """Raise `ReproError` if the node cannot do its part, or does not answer."""
        if self.refused is not None:
            raise self.refused
        if self._exit is not None and self._exit.lost:
            raise InfraError(f"rank {self._rank}: {self._exit.detail}")
        if not self.address and time.monotonic() - self._begun > _BEGINS_IN_S:
            raise InfraError(
                f"no node of the cluster took rank {self._rank} within {_BEGINS_IN_S:.0f} s",
                hint="`ray status` shows what is taken",
            )

    def _read(self) -> None:
        """Take chunks from the node until its task ends; note how its server exited or was lost.

        Then set `ended`. It runs in a thread.
        """
        ray, lost = self._ray, "its process ended early"
        try:
            while True:
                self._take(*ray.get(next(self._stream)))
                self._heard = time.monotonic()
        except StopIteration:
            pass
        except ray.exceptions.RayTaskError as error:
            lost = f"it could not be started on its node: {' '.join(f'{error.cause!r}'.split())}"
        except ray.exceptions.RayError as error:
            lost = (
                f"its node {self.address} was lost:"
                f" {' '.join(f'{error}'.split()).partition('. ')[0]}"
            )
        except OSError as error:
            lost = f"its log cannot be written: {error.strerror}"
            ray.cancel(self._stream)
        finally:
            if self._exit is None:
                self._exit = Exit(code=None, detail=lost, at=time.time(), lost=True)
            self.ended.set()

    def _take(self, name: str, at: int, data: bytes) -> None:
        """Take a chunk by its name: address, output, error, facts of the server, exit or log."""
        if name == NODE:
            self.address = data.decode()
        elif name == OUTPUT:
            for line in data.decode("utf-8", "replace").splitlines():
                self._say(f"{self.address}: {line.strip()}")
        elif name == ERROR:
            error = json.loads(data)
            self.refused = getattr(errors, error["type"])(
                f"{self.address}: {error['message']}", hint=error["hint"]
            )
        elif name == STARTED:
            self._started = json.loads(data)
        elif name == EXIT:
            self._exit = Exit(**json.loads(data), at=time.time())  # not by the clock of the node
        elif name == RANK_LOG and self.log_path is not None:
            with self.log_path.open("r+b") as file:
                file.seek(at)
                file.write(data)

    async def start(self) -> ServerFacts:
        """Start the task; return the facts of the server once it has started on the node.

        Raises `ReproError` if the node cannot do its part, or is lost.
        """
        self.begin()
        while self._started is None:
            self.check()
            await asyncio.sleep(POLL_S)
        return ServerFacts(
            kind=ServerKind(self._started["kind"]),
            evidence=Evidence(self._started["evidence"]),
            argv=tuple(self._started["argv"]),
            env=self._started["env"],
            pid=self._started["pid"],
        )

    async def exited(self) -> Exit:
        """Wait until the task has ended; return how its server exited."""
        while not self.ended.is_set():
            await asyncio.sleep(POLL_S)
        assert self._exit is not None
        return self._exit

    async def stop(self) -> None:
        """Wait at most 3 s for the rest of its log, then end the server on its node.

        Does nothing before `start`.
        """
        if self._stream is None:
            return
        last = time.monotonic() + _SETTLES_IN_S
        while not self.ended.is_set() and time.monotonic() < min(last, self._heard + _SETTLED_S):
            await asyncio.sleep(POLL_S)
        await asyncio.shield(asyncio.to_thread(self.end))

    def end(self) -> None:
        """Cancel the task, and wait for at most a minute until its node has ended the server."""
        if not self.ended.is_set():
            self._ray.cancel(self._stream)
            self.ended.wait(_ENDS_IN_S)
