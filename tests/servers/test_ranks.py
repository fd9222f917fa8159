"""From one node's launch to those of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.command.container import ContainerSpec, Publish
from vllm_repro.command.parse import parse
from vllm_repro.evidence import Evidence
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import Launch
from vllm_repro.servers.ranks import containers_over_nodes, nodes_of, over_nodes


def launch(flags: str, evidence: Evidence = Evidence.CPU) -> Launch:
    command = parse(f"vllm serve m --host 127.0.0.1 --port 8001 {flags}")
    argv = ("/r/bin/vllm", "serve", *command.argv())
    return Launch(ServerKind.PROCESS, evidence, command, argv, {"A": "1"}, port=8001)


@pytest.mark.parametrize("flags", ["", "--tensor-parallel-size 2", "--nnodes 1"])
def test_one_node_stays_as_it_is(flags: str) -> None:
    alone = launch(flags)
    assert nodes_of(alone) == 1
    assert over_nodes(alone, 9000) == (alone, ())


@given(st.integers(2, 8))
def test_every_node_has_a_rank_of_its_own_and_only_the_first_has_http(nodes: int) -> None:
    head, followers = over_nodes(launch(f"--nnodes {nodes} --tensor-parallel-size {nodes}"), 9000)
    lines = [head.argv, *(follower.argv for follower in followers)]
    commands = [parse(f"vllm serve {' '.join(argv[2:])}") for argv in lines]
    assert [command.number("--node-rank") for command in commands] == list(range(nodes))
    assert [command.has("--headless") for command in commands] == [False, *[True] * (nodes - 1)]
    assert [command.has("--port") for command in commands] == [True, *[False] * (nodes - 1)]
    assert {command.number("--master-port") for command in commands} == {9000}
    assert {command.get("--master-addr") for command in commands} == {"127.0.0.1"}
    assert head.argv[:2] == ("/r/bin/vllm", "serve")
    assert head.env["GLOO_SOCKET_IFNAME"] == "lo"
    assert all(follower.env == dict(head.env) for follower in followers)


def test_on_gpus_each_node_gets_its_own() -> None:
    head, (follower,) = over_nodes(launch("--nnodes 2 --tensor-parallel-size 4", Evidence.GPU), 9000)
    assert (head.env["CUDA_VISIBLE_DEVICES"], follower.env["CUDA_VISIBLE_DEVICES"]) == ("0,1", "2,3")
    assert "GLOO_SOCKET_IFNAME" not in head.env


def test_the_report_says_that_the_nodes_are_on_one_host() -> None:
    head, _ = over_nodes(launch("--nnodes 2"), 9000)
    assert head.differences[-1] == "2 nodes as processes on one host, which meet at 127.0.0.1:9000"


def test_containers_share_the_network_of_the_first() -> None:
    alone = launch("--nnodes 2 --tensor-parallel-size 2")
    spec = ContainerSpec(
        image="image",
        argv=("m", *["--nnodes", "2", "--tensor-parallel-size", "2"]),
        name="run-a-1",
        publish=(Publish(8001),),
    )
    head, (other,) = containers_over_nodes(replace(alone, container=spec))
    assert head.container is not None
    assert (head.container.name, head.container.network, head.container.publish) == ("run-a-1", None, (Publish(8001),))
    assert (other.name, other.network, other.publish) == ("run-a-1-rank1", "container:run-a-1", ())
    assert other.argv[-1] == "--headless"
    commands = [parse(f"vllm serve {' '.join(one.argv)}") for one in (head.container, other)]
    assert [command.number("--node-rank") for command in commands] == [0, 1]
    assert {command.get("--master-addr") for command in commands} == {"127.0.0.1"}
