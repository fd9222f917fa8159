"""Nodes of one server on several nodes of a Ray cluster, for commands with `--nnodes` such as that of dsv4-tp2.

`fleet` reserves the nodes of the cluster, and the run goes to the first of them. Its process starts one task per further node and boot:
`run_item` with a `Rank`, which prepares that node and starts its `vllm serve`. What that logs comes back while it runs.
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
from vllm_repro.evidence import Evidence
from vllm_repro.running.fleet import ray_at
from vllm_repro.running.item import ERROR, EXIT, NODE, OUTPUT, POLL_S, RANK_LOG, STARTED, Item, Rank, start_item
from vllm_repro.scenario.scenario import Arm
from vllm_repro.servers.base import Exit, Server, ServerFacts
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.multi_node import Meeting

__all__ = ["ClusterNodes"]

_BEGINS_IN_S = 120.0
"""A node that was lost is replaced by another one, if there is one."""
_ENDS_IN_S = 60.0


class ClusterNodes:
    """The nodes that `fleet` reserved for the servers of a run. It fits `servers.multi_node.Nodes`."""

    def __init__(self, item: Item, say: Callable[[str], None]) -> None:
        """Connect this process to the cluster. Raises `InfraError`."""
        self._ray, self._item, self._say = ray_at(item.cluster, item.address), item, say
        self.address = item.address
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            del os.environ[name]  # servers inherit the rest

    def prepare(self) -> None:
        """Fetch what the servers need on each further node. Raises like `open_site`."""
        for rank in range(1, self._item.nodes):
            node = _Node(self._ray, self._item, Rank(rank=rank), None, self._say)
            node.begin()
            node.ended.wait()
            if node.refused is not None:
                raise node.refused

    def server(self, arm: Arm, rank: int, meeting: Meeting, log: Path) -> Server:
        return _Node(self._ray, self._item, Rank(rank=rank, arm=arm, meeting=meeting), log, self._say)


class _Node(Server):
    """The server of one further node. log: None if it has only to be prepared."""

    def __init__(self, ray: Any, item: Item, rank: Rank, log: Path | None, say: Callable[[str], None]) -> None:
        self.base_url = "http://127.0.0.1:0"
        self.log_path = log
        self.refused: ReproError | None = None
        self.ended = threading.Event()
        self._ray, self._rank, self._say = ray, rank.rank, say
        self._item = replace(item, rank=rank, resume="")
        self._started: dict[str, Any] | None = None
        self._exit: Exit | None = None
        self._address = ""
        self._stream: Any = None

    def begin(self) -> None:
        if self.log_path is not None:
            self.log_path.touch()
        self._stream = start_item(self._ray, self._item, self._rank, {})
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        ray = self._ray
        try:
            while True:
                self._take(*ray.get(next(self._stream)))
        except StopIteration:
            pass
        except ray.exceptions.RayError as error:
            text = f"its node {self._address} was lost: {' '.join(f'{error}'.split()).partition('. ')[0]}"
            self._exit = Exit(code=None, detail=text, at=time.time(), lost=True)
        finally:
            if self._exit is None:
                text = f"its process on {self._address or 'the node'} ended early"
                self._exit = Exit(code=None, detail=text, at=time.time(), lost=True)
            self.ended.set()

    def _take(self, name: str, at: int, data: bytes) -> None:
        if name == NODE:
            self._address = data.decode()
        elif name == OUTPUT:
            for line in data.decode("utf-8", "replace").splitlines():
                self._say(f"{self._address}: {line.strip()}")
        elif name == ERROR:
            said = json.loads(data)
            self.refused = getattr(errors, said["type"])(f"{self._address}: {said['message']}", hint=said["hint"])
        elif name == STARTED:
            self._started = json.loads(data)
        elif name == EXIT:
            self._exit = Exit(**json.loads(data))
        elif name == RANK_LOG and self.log_path is not None:
            with self.log_path.open("r+b") as file:
                file.seek(at)
                file.write(data)

    async def start(self) -> ServerFacts:
        self.begin()
        began = time.monotonic()
        while self._started is None:
            if self.refused is not None:
                raise self.refused
            if self.ended.is_set():
                assert self._exit is not None
                raise InfraError(f"rank {self._rank}: {self._exit.detail}")
            if time.monotonic() - began > _BEGINS_IN_S:
                raise InfraError(
                    f"no node of the cluster started rank {self._rank} within {_BEGINS_IN_S:.0f} s",
                    hint="`ray status` shows what is taken",
                )
            await asyncio.sleep(POLL_S)
        return ServerFacts(
            kind=ServerKind(self._started["kind"]),
            evidence=Evidence(self._started["evidence"]),
            argv=tuple(self._started["argv"]),
            env=self._started["env"],
            pid=self._started["pid"],
        )

    async def exited(self) -> Exit:
        while not self.ended.is_set():
            await asyncio.sleep(POLL_S)
        assert self._exit is not None
        return self._exit

    async def stop(self) -> None:
        if self._stream is None:
            return
        await asyncio.sleep(2 * POLL_S)  # for the last lines of its log
        await asyncio.shield(asyncio.to_thread(self._end))

    def _end(self) -> None:
        if not self.ended.is_set():
            self._ray.cancel(self._stream)
            self.ended.wait(_ENDS_IN_S)  # until the node has ended its server
