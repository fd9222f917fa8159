"""One server over several nodes: from the launch of its first node to those of all of them. Pure.

vLLM is started once a node, with `--node-rank`; every node but the first is `--headless` and has no HTTP. Here the nodes are processes or
containers on one host, side by side on its GPUs or on its CPU, and meet on loopback. The containers share the network of the first one, so
that there is a loopback for them to share and no network to clean up.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from vllm_repro.command.container import LOOPBACK, ContainerSpec
from vllm_repro.command.parse import parse
from vllm_repro.evidence import Evidence
from vllm_repro.servers.launch import Launch

__all__ = ["Follower", "containers_over_nodes", "nodes_of", "over_nodes"]

_MASTER_PORT = 29501  # within a network of their own nobody else has it
_CPU_ENV = {
    "GLOO_SOCKET_IFNAME": "lo",  # takes the place of NCCL, and would look for a network card
    "VLLM_HOST_IP": LOOPBACK,
    "OMP_NUM_THREADS": "1",  # the ranks share the cores
}


@dataclass(frozen=True)
class Follower:
    """What is run for one further node."""

    rank: int
    argv: tuple[str, ...]
    env: dict[str, str]


def nodes_of(launch: Launch) -> int:
    """How many nodes the command is for."""
    return launch.command.number("--nnodes") or 1


def over_nodes(launch: Launch, master_port: int) -> tuple[Launch, tuple[Follower, ...]]:
    """`launch` as its first node, and the others. `master_port`: a free port on loopback where they meet.

    A command for one node comes back as it is.
    """
    nodes = nodes_of(launch)
    if nodes == 1:
        return launch, ()
    meeting = (f"--master-addr {LOOPBACK}", f"--master-port {master_port}")
    env = dict(launch.env) | (_CPU_ENV if launch.evidence is not Evidence.GPU else {})
    serve = launch.argv.index("serve")
    followers = []
    for rank in range(1, nodes):
        http = [name for name in ("--host", "--port") if launch.command.has(name)]
        command = launch.command.without(*http).with_flags(*meeting, f"--node-rank {rank}", "--headless")
        followers.append(Follower(rank, (*launch.argv[: serve + 1], *command.argv()), env | _gpus(launch, rank)))
    head = launch.command.with_flags(*meeting, "--node-rank 0")
    difference = f"{nodes} nodes as processes on one host, which meet at {LOOPBACK}:{master_port}"
    return (
        replace(
            launch,
            command=head,
            argv=(*launch.argv[: serve + 1], *head.argv()),
            env=env | _gpus(launch, 0),
            differences=(*launch.differences, difference),
        ),
        tuple(followers),
    )


def containers_over_nodes(launch: Launch) -> tuple[Launch, tuple[ContainerSpec, ...]]:
    """`launch`, of a container with a name, as its first node, and the containers of the others."""
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
        for rank in range(1, nodes_of(launch))
    )
    difference = f"{1 + len(followers)} nodes as containers on one host, which share the network of the first"
    return (
        replace(launch, container=head, argv=head.argv, env=dict(env), differences=(*launch.differences, difference)),
        followers,
    )


def _gpus(launch: Launch, rank: int) -> dict[str, str]:
    """On one host each node gets GPUs of its own."""
    if launch.evidence is not Evidence.GPU:
        return {}
    ranks = launch.command.number("--tensor-parallel-size") or 1
    each = max(1, ranks // nodes_of(launch))
    return {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in range(rank * each, (rank + 1) * each))}
