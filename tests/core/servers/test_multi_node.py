"""One server over several nodes."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands import lives
from tests.core.servers.docker_helpers import running
from vllm_repro.command.container import ContainerSpec, Publish
from vllm_repro.command.parse import parse
from vllm_repro.errors import InfraError
from vllm_repro.host.ports import free_port
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import Launch
from vllm_repro.servers.multi_node import (
    Meeting,
    MultiNodeServer,
    container_nodes,
    node_count,
    process_nodes,
)
from vllm_repro.servers.process import ProcessServer
from vllm_repro_diagnosis.evidence import Evidence

pytestmark = pytest.mark.anyio
MEETING = Meeting(port=9000)


def launch(flags: str, evidence: Evidence = Evidence.CPU) -> Launch:
    command = parse(f"vllm serve m --host 127.0.0.1 --port 8001 {flags}")
    argv = ("/r/bin/vllm", "serve", *command.argv())
    return Launch(
        kind=ServerKind.PROCESS,
        evidence=evidence,
        command=command,
        argv=argv,
        env={"A": "1"},
        port=8001,
    )


@pytest.mark.parametrize("flags", ["", "--tensor-parallel-size 2", "--nnodes 1"])
def test_one_node_stays_as_it_is(flags: str) -> None:
    alone = launch(flags)
    assert (node_count(alone), process_nodes(alone, MEETING)) == (1, [alone])


@given(st.integers(2, 8))
def test_every_node_has_a_rank_and_only_the_first_has_http(nodes: int) -> None:
    head, *followers = process_nodes(
        launch(f"--nnodes {nodes} --tensor-parallel-size {nodes}"), MEETING
    )
    commands = [parse(f"vllm serve {' '.join(node.argv[2:])}") for node in (head, *followers)]
    assert [command.number("--node-rank") for command in commands] == list(range(nodes))
    assert [command.has("--headless") for command in commands] == [False, *[True] * (nodes - 1)]
    assert [command.has("--port") for command in commands] == [True, *[False] * (nodes - 1)]
    assert {command.number("--master-port") for command in commands} == {9000}
    assert {command.get("--master-addr") for command in commands} == {"127.0.0.1"}
    assert (head.argv[:2], head.env["GLOO_SOCKET_IFNAME"]) == (("/r/bin/vllm", "serve"), "lo")
    assert all(follower.env == dict(head.env) for follower in followers)


def test_on_gpus_each_node_gets_its_own() -> None:
    whole = launch("--nnodes 2 --tensor-parallel-size 4", Evidence.GPU)
    head, follower = process_nodes(whole, MEETING)
    assert head.differences[-1] == "2 nodes as processes on one host, which meet at 127.0.0.1:9000"
    assert [node.env["CUDA_VISIBLE_DEVICES"] for node in (head, follower)] == ["0,1", "2,3"]
    assert "GLOO_SOCKET_IFNAME" not in head.env
    leased = process_nodes(replace(whole, gpus=("1", "4", "5", "7")), MEETING)
    assert [node.env["CUDA_VISIBLE_DEVICES"] for node in leased] == ["1,4", "5,7"]


def test_containers_share_the_network_of_the_first() -> None:
    alone = launch("--nnodes 2 --tensor-parallel-size 2")
    words = ("m", "--nnodes", "2", "--tensor-parallel-size", "2")
    spec = ContainerSpec(image="image", argv=words, name="run-a-1", publish=(Publish(8001),))
    head, launched = container_nodes(replace(alone, container=spec))
    other = launched.container
    assert head.container is not None
    assert other is not None
    assert (head.container.name, head.container.network, head.container.publish) == (
        "run-a-1",
        None,
        (Publish(8001),),
    )
    assert (other.name, other.network, other.publish) == ("run-a-1-rank1", "container:run-a-1", ())
    assert other.argv[-1] == "--headless"
    commands = [parse(f"vllm serve {' '.join(one.argv)}") for one in (head.container, other)]
    assert [command.number("--node-rank") for command in commands] == [0, 1]
    assert {command.get("--master-addr") for command in commands} == {"127.0.0.1"}


SLEEP = "import time; print('up', flush=True); time.sleep(600)"
WITH_CHILD = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time;"
    " time.sleep(600)']); time.sleep(600)"
)


def server(tmp_path: Path, head: str, *others: str) -> MultiNodeServer:
    def process(name: str, code: str) -> ProcessServer:
        return ProcessServer(
            (sys.executable, "-c", code),
            port=free_port(),
            log=tmp_path / name,
            env={},
            kind=ServerKind.PROCESS,
            evidence=Evidence.CPU,
            grace=2.0,
        )

    names = ["reported-1.log", "reported-1.rank1.log", "reported-1.rank2.log"]
    return MultiNodeServer(
        [process(name, code) for name, code in zip(names, (head, *others), strict=False)]
    )


async def test_all_are_started_named_and_ended(tmp_path: Path) -> None:
    ranked = server(tmp_path, SLEEP, SLEEP, WITH_CHILD)
    facts = await ranked.start()
    assert [rank.rank for rank in facts.ranks] == [1, 2]
    names = [path.name for path in ranked.rank_logs]
    assert names == ["reported-1.rank1.log", "reported-1.rank2.log"]
    while len(ranked.processes()) < 2:
        await asyncio.sleep(0.05)
    pids = {facts.pid or 0, *(rank.pid or 0 for rank in facts.ranks), *ranked.processes()}
    assert ranked.processes()[0] == facts.pid, "the API server's process comes first"
    await ranked.stop()
    await ranked.stop()
    assert (len(pids), [pid for pid in pids if lives(pid)]) == (4, [])


async def test_an_exit_of_another_node_is_reported_with_its_rank(tmp_path: Path) -> None:
    ranked = server(tmp_path, SLEEP, SLEEP, "raise SystemExit(3)")
    async with running(ranked):
        rank, ended = await asyncio.wait_for(ranked.rank_exited(), 20)
    assert (rank, ended.code) == (2, 3)


async def test_a_node_that_cannot_be_started_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranked = server(tmp_path, SLEEP, SLEEP)
    monkeypatch.setattr(ranked.followers[0], "argv", ("/does/not/exist",))
    with pytest.raises(InfraError, match="cannot start"):
        await ranked.start()
    assert ranked.head.processes() == ()


async def test_a_node_that_stays_when_the_first_is_gone_is_named(tmp_path: Path) -> None:
    ranked = server(tmp_path, "raise SystemExit(0)", "raise SystemExit(0)", SLEEP)
    async with running(ranked):
        await asyncio.wait_for(ranked.exited(), 20)
        assert await ranked.surviving_ranks(2.0) == (2,)
        await ranked.stop()
        assert await ranked.surviving_ranks(2.0) == ()
