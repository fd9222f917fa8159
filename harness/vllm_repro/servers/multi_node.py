"""One server over several nodes.

vLLM starts once per node, with `--node-rank`; every node but the first is `--headless` and has no
HTTP. The nodes are processes or containers on one host, which meet on loopback, or processes on
several (`Nodes`). The containers share the network of the first one.

The engine is watched at its first node. The other nodes start after it and are stopped after it.
While it boots, the exit of a node is a crash, because the first node would wait for it. Later it is
not: the engine survives the death of another node's `vllm serve`.
"""

from __future__ import annotations

import asyncio
import shlex
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Protocol

import psutil

from vllm_repro.command.command import ServeCommand
from vllm_repro.command.container import LOOPBACK
from vllm_repro.command.parse import parse
from vllm_repro.scenario.scenario import Arm
from vllm_repro.servers.base import Exit, Server, ServerFacts
from vllm_repro.servers.launch import Launch, gpu_env
from vllm_repro_diagnosis.evidence import Evidence


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Address and port at which the nodes of one server meet (`--master-addr`, `--master-port`)."""

    # address of the first node's host
    address: str = LOOPBACK
    # free port at that address
    port: int


class Nodes(Protocol):
    """Other hosts of a cluster, on which the nodes of a server after the first run."""

    # address of this host, as the other hosts reach it
    address: str

    def server(self, arm: Arm, rank: int, meeting: Meeting, log: Path) -> Server:
        """Return the server of one node, not started; it writes the node's log to this host."""


_IN_CONTAINERS = Meeting(port=29501)  # free, because the containers have their own network


def node_count(launch: Launch) -> int:
    """Return the number of nodes (`--nnodes`) in the command of a launch; 1 without the flag."""
    return launch.command.number("--nnodes") or 1


def process_nodes(launch: Launch, meeting: Meeting) -> list[Launch]:
    """Split a process's launch into one launch per node, by rank; one node stays as it is."""
    nodes = node_count(launch)
    if nodes == 1:
        return [launch]
    program = launch.argv[: launch.argv.index("serve") + 1]
    hosts = (
        "processes on one host"
        if meeting.address == LOOPBACK
        else "processes on hosts of a cluster"
    )
    difference = f"{nodes} nodes as {hosts}, which meet at {meeting.address}:{meeting.port}"
    launches = []
    for rank, command in enumerate(_commands(launch.command, nodes, meeting)):
        env = _environment(launch, meeting) | gpu_env(_gpus_of_node(launch, rank))
        argv, differences = (*program, *command.argv()), (*launch.differences, difference)
        launches.append(
            replace(launch, command=command, argv=argv, env=env, differences=differences)
        )
    return launches


def container_nodes(launch: Launch) -> list[Launch]:
    """Split a container's launch into one launch per node, by rank; one node stays as it is.

    A container of several nodes must have a name.
    """
    spec, nodes = launch.container, node_count(launch)
    assert spec is not None
    if nodes == 1:
        return [launch]
    assert spec.name is not None
    env = _environment(launch, _IN_CONTAINERS)
    difference = f"{nodes} nodes as containers on one host, which share the network of the first"
    launches = []
    for rank, command in enumerate(
        _commands(parse(shlex.join(("vllm", "serve", *spec.argv))), nodes, _IN_CONTAINERS)
    ):
        gpus = ",".join(_gpus_of_node(launch, rank))
        node = replace(
            spec,
            argv=command.argv(),
            env=tuple(env.items()),
            gpus=f"device={gpus}" if gpus else spec.gpus,
        )
        if rank:
            node = replace(
                node, name=f"{spec.name}-rank{rank}", network=f"container:{spec.name}", publish=()
            )
        differences = (*launch.differences, difference)
        launches.append(
            replace(launch, container=node, argv=node.argv, env=env, differences=differences)
        )
    return launches


def _commands(command: ServeCommand, nodes: int, at: Meeting) -> Iterator[ServeCommand]:
    """Yield the `vllm serve` command of each node, by rank; all but the first are headless.

    at: where the nodes meet.
    """
    meeting = (f"--master-addr {at.address}", f"--master-port {at.port}")
    yield command.with_flags(*meeting, "--node-rank 0")
    headless = command.without(*(name for name in ("--host", "--port") if command.has(name)))
    for rank in range(1, nodes):
        yield headless.with_flags(*meeting, f"--node-rank {rank}", "--headless")


def _environment(launch: Launch, meeting: Meeting) -> dict[str, str]:
    """Return the variables of a node; on a CPU with its address and network interface."""
    if launch.evidence is Evidence.GPU:
        return dict(launch.env)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as towards:  # sends nothing
        towards.connect((meeting.address, meeting.port))
        node_address = str(towards.getsockname()[0])
    cards = (
        card
        for card, addresses in psutil.net_if_addrs().items()
        if node_address in (assigned.address for assigned in addresses)
    )
    return {
        **launch.env,
        # replaces NCCL, and would choose a network interface by the host's name
        "GLOO_SOCKET_IFNAME": next(cards),
        "VLLM_HOST_IP": node_address,
        "OMP_NUM_THREADS": "1",  # the ranks may share the cores
    }


def _gpus_of_node(launch: Launch, rank: int) -> Sequence[str]:
    """Return the indices of the GPUs for the node of `rank`; none on a CPU.

    Without a lease they count from 0. A node on a separate host gets all leased ones.
    """
    if launch.evidence is not Evidence.GPU:
        return ()
    sizes = ("--tensor-parallel-size", "--pipeline-parallel-size")
    ranks = prod(launch.command.number(flag) or 1 for flag in sizes)
    each = max(1, ranks // node_count(launch))
    first = 0 if len(launch.gpus) == each else rank * each
    mine = range(first, first + each)
    return [launch.gpus[index] if launch.gpus else str(index) for index in mine]


def one_server(nodes: Sequence[Server]) -> Server:
    """Return the nodes as one server; a single node is returned as it is."""
    return MultiNodeServer(nodes) if len(nodes) > 1 else nodes[0]


def node_log(log: Path, rank: int) -> Path:
    """Return the log path of the node of `rank`, beside `log`, that of the first node."""
    return log.with_suffix(f".rank{rank}.log") if rank else log


class MultiNodeServer(Server):
    """One vLLM server over several nodes, each with its own log.

    Its URL, log and end are those of the first node. nodes: by rank.
    """

    def __init__(self, nodes: Sequence[Server]) -> None:
        self.head, *self.followers = nodes
        self.base_url = self.head.base_url
        self.log_path = self.head.log_path

    @property
    def rank_logs(self) -> tuple[Path, ...]:
        """Return the log files of the nodes after the first, by rank."""
        return tuple(
            follower.log_path for follower in self.followers if follower.log_path is not None
        )

    async def start(self) -> ServerFacts:
        """Start all nodes, the first one first, and return their facts; stop all if one fails."""
        try:
            first = await self.head.start()  # before the others, whose containers join its network
            ranks = []
            for rank, follower in enumerate(self.followers, 1):
                ranks.append(replace(await follower.start(), rank=rank))
            return replace(first, ranks=tuple(ranks))
        except BaseException:
            await self.stop()
            raise

    def booted(self, facts: ServerFacts, *, ready: bool) -> ServerFacts:
        """Return the first node's `facts` after the boot; raise what another node raises."""
        for follower in self.followers:
            # only for its errors: its facts are those of the first node
            follower.booted(facts, ready=ready)
        return self.head.booted(facts, ready=ready)

    async def exited(self) -> Exit:
        """Wait until the first node has ended, and return how."""
        return await self.head.exited()

    async def rank_exited(self) -> tuple[int, Exit]:
        """Wait until a node after the first ends, and return its rank and how it ended."""
        exits = await self._exits(asyncio.FIRST_COMPLETED)
        return min(exits), exits[min(exits)]

    async def surviving_ranks(self, seconds: float) -> tuple[int, ...]:
        """Wait `seconds`, and return the ranks of the nodes after the first that still run.

        Return early once all of them have ended.
        """
        exits = await self._exits(asyncio.ALL_COMPLETED, seconds)
        return tuple(rank for rank in range(1, len(self.followers) + 1) if rank not in exits)

    async def _exits(self, when: str, seconds: float | None = None) -> dict[int, Exit]:
        """Wait until one or all (`when`) of the other nodes end; return how, by rank.

        After `seconds` return those that have ended. May be cancelled and called again.
        """
        waits = {
            asyncio.ensure_future(follower.exited()): rank
            for rank, follower in enumerate(self.followers, 1)
        }
        try:
            done, _ = await asyncio.wait(waits, timeout=seconds, return_when=when)
            return {waits[task]: task.result() for task in done}
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def stop(self) -> None:
        """Stop all nodes, the first one first."""
        for server in (self.head, *self.followers):
            await server.stop()

    def other_listener(self) -> str:
        """Return a phrase for another process that listens in place of the first node, or ''."""
        return self.head.other_listener()

    def processes(self) -> tuple[int, ...]:
        """Return the pids of the first node and of the workers of all others."""
        # The first process of another node is its launcher; only its workers are part of the
        # engine.
        workers = (pid for follower in self.followers for pid in follower.processes()[1:])
        return (*self.head.processes(), *workers)
