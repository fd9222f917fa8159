"""One server over several nodes.

vLLM starts once per node, with `--node-rank`; every node but the first is `--headless` and has no HTTP. Here the nodes are processes or
containers on one host, which meet on loopback. The containers share the network of the first one.

The engine is watched at its first node. The other nodes start after it and end after it. While it boots, the exit of a node is a crash,
because the first node would wait for it. Later it is not: the engine survives the death of another node's `vllm serve`.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_repro.command.container import LOOPBACK, ContainerSpec
from vllm_repro.command.parse import parse
from vllm_repro.evidence import Evidence
from vllm_repro.servers.base import Exit, RankFacts, Server, ServerFacts
from vllm_repro.servers.launch import Launch

__all__ = ["Follower", "MultiNodeServer", "container_nodes", "node_count", "process_nodes"]

_MASTER_PORT = 29501  # free, since the containers have a network of their own
_CPU_ENV = {
    "GLOO_SOCKET_IFNAME": "lo",  # replaces NCCL, and would look for a network card
    "VLLM_HOST_IP": LOOPBACK,
    "OMP_NUM_THREADS": "1",  # the ranks share the cores
}


@dataclass(frozen=True, kw_only=True)
class Follower:
    """What runs on one node after the first."""

    rank: int
    argv: tuple[str, ...]
    env: dict[str, str]


def node_count(launch: Launch) -> int:
    """Return the number of nodes that the command is for."""
    return launch.command.number("--nnodes") or 1


def process_nodes(launch: Launch, master_port: int) -> tuple[Launch, tuple[Follower, ...]]:
    """Return the launch of the first node, and the other nodes. A command for one node is returned as it is.

    master_port: a free port on loopback where the nodes meet.
    """
    nodes = node_count(launch)
    if nodes == 1:
        return launch, ()
    meeting = (f"--master-addr {LOOPBACK}", f"--master-port {master_port}")
    env = dict(launch.env) | (_CPU_ENV if launch.evidence is not Evidence.GPU else {})
    serve = launch.argv.index("serve")
    followers = []
    for rank in range(1, nodes):
        http = [name for name in ("--host", "--port") if launch.command.has(name)]
        command = launch.command.without(*http).with_flags(*meeting, f"--node-rank {rank}", "--headless")
        followers.append(
            Follower(rank=rank, argv=(*launch.argv[: serve + 1], *command.argv()), env=env | _gpus(launch, rank))
        )
    command = launch.command.with_flags(*meeting, "--node-rank 0")
    difference = f"{nodes} nodes as processes on one host, which meet at {LOOPBACK}:{master_port}"
    head = replace(
        launch,
        command=command,
        argv=(*launch.argv[: serve + 1], *command.argv()),
        env=env | _gpus(launch, 0),
        differences=(*launch.differences, difference),
    )
    return head, tuple(followers)


def container_nodes(launch: Launch) -> tuple[Launch, tuple[ContainerSpec, ...]]:
    """Return the launch of the first node, and the containers of the others. The container of `launch` must have a name."""
    spec = launch.container
    assert spec is not None
    assert spec.name is not None
    env = tuple((dict(spec.env) | (_CPU_ENV if launch.evidence is not Evidence.GPU else {})).items())

    def node(rank: int, *more: str) -> ContainerSpec:
        meeting = (f"--master-addr {LOOPBACK}", f"--master-port {_MASTER_PORT}", f"--node-rank {rank}")
        command = parse(shlex.join(("vllm", "serve", *spec.argv))).with_flags(*meeting, *more)
        gpus = _gpus(launch, rank).get("CUDA_VISIBLE_DEVICES")
        return replace(spec, argv=command.argv(), env=env, gpus=f"device={gpus}" if gpus else spec.gpus)

    head = node(0)
    followers = tuple(
        replace(node(rank, "--headless"), name=f"{spec.name}-rank{rank}", network=f"container:{spec.name}", publish=())
        for rank in range(1, node_count(launch))
    )
    difference = f"{1 + len(followers)} nodes as containers on one host, which share the network of the first"
    return (
        replace(launch, container=head, argv=head.argv, env=dict(env), differences=(*launch.differences, difference)),
        followers,
    )


def _gpus(launch: Launch, rank: int) -> dict[str, str]:
    """Return the variable that gives each node GPUs of its own."""
    if launch.evidence is not Evidence.GPU:
        return {}
    ranks = launch.command.number("--tensor-parallel-size") or 1
    each = max(1, ranks // node_count(launch))
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in range(rank * each, (rank + 1) * each))}


class MultiNodeServer(Server):
    """A server of several nodes. head: the first node. followers: the others, by rank from 1, each with its own log."""

    def __init__(self, head: Server, followers: Sequence[Server]) -> None:
        self.head = head
        self.followers = tuple(followers)
        self.base_url = head.base_url
        self.log_path = head.log_path

    @property
    def rank_logs(self) -> tuple[Path, ...]:
        return tuple(follower.log_path for follower in self.followers if follower.log_path is not None)

    async def start(self) -> ServerFacts:
        try:
            first = await self.head.start()  # before the others, whose containers join its network
            ranks = []
            for rank, follower in enumerate(self.followers, 1):
                facts = await follower.start()
                ranks.append(
                    RankFacts(rank=rank, argv=facts.argv, env=facts.env, pid=facts.pid, container_id=facts.container_id)
                )
            return replace(first, ranks=tuple(ranks))
        except BaseException:
            await self.stop()
            raise

    def booted(self, facts: ServerFacts, *, ready: bool) -> ServerFacts:
        for follower in self.followers:
            follower.booted(facts, ready=ready)  # only for what it raises: its facts are those of the first node
        return self.head.booted(facts, ready=ready)

    async def exited(self) -> Exit:
        return await self.head.exited()

    async def rank_exited(self) -> tuple[int, Exit]:
        exits = await self._exits(asyncio.FIRST_COMPLETED)
        return min(exits), exits[min(exits)]

    async def surviving_ranks(self, seconds: float) -> tuple[int, ...]:
        exits = await self._exits(asyncio.ALL_COMPLETED, seconds)
        return tuple(rank for rank in range(1, len(self.followers) + 1) if rank not in exits)

    async def _exits(self, when: str, seconds: float | None = None) -> dict[int, Exit]:
        """Return how other nodes ended, by rank. May be cancelled and called again."""
        waits = {asyncio.ensure_future(follower.exited()): rank for rank, follower in enumerate(self.followers, 1)}
        try:
            done, _ = await asyncio.wait(waits, timeout=seconds, return_when=when)
            return {waits[task]: task.result() for task in done}
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def stop(self) -> None:
        for server in (self.head, *self.followers):
            await server.stop()

    def other_listener(self) -> str:
        return self.head.other_listener()

    def processes(self) -> tuple[int, ...]:
        own = self.head.processes()
        # The first process of another node is its launcher; only its workers are part of the engine.
        return own + tuple(pid for follower in self.followers for pid in follower.processes()[1:])
