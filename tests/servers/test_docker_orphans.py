"""What a killed run leaves in a real engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers.docker_helpers import IDLE, containers_of
from vllm_repro.command.container import ContainerSpec
from vllm_repro.host.owner import this_owner
from vllm_repro.host.ports import free_port
from vllm_repro.servers.docker import DockerServer
from vllm_repro.servers.docker_engine import OWNER_LABEL, RUN_LABEL, Engine
from vllm_repro.servers.docker_orphans import Kind, list_leftovers, remove_container, remove_leftovers

# What has lost its owner is swept by any run that begins beside it.
pytestmark = [pytest.mark.docker, pytest.mark.alone]

CLIENT = """
import asyncio, sys, time
from pathlib import Path
from vllm_repro.command.container import ContainerSpec, Publish
from vllm_repro.evidence import Evidence
from vllm_repro.servers.docker import DockerServer
image, run, log, port, program = sys.argv[1:]
spec = ContainerSpec(image=image, entrypoint=("python3", "-c", program), publish=(Publish(int(port)),))
server = DockerServer(spec, log=Path(log), run=run, evidence=Evidence.CPU)
print(asyncio.run(server.start()).container_id, flush=True)
time.sleep(600)
"""


@pytest.fixture
def killed(base_image: str, run_id: str, tmp_path: Path) -> str:
    """The id of a container whose harness was killed by SIGKILL."""
    words = [sys.executable, "-c", CLIENT, base_image, run_id, str(tmp_path / "killed.log"), str(free_port()), IDLE]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as client:
        assert client.stdout is not None
        container = client.stdout.readline().strip()
        client.kill()
    assert container
    return container


@pytest.fixture
def bystander(docker_engine: Engine, base_image: str) -> Iterator[str]:
    """A container of somebody else in the same engine."""
    container = docker_engine.client.containers.create(base_image, ["true"], labels={"com.example": "theirs"})
    assert container.id is not None
    yield container.id
    docker_engine.client.api.remove_container(container.id)


def test_only_what_a_killed_run_left_is_removed(
    killed: str,
    bystander: str,
    docker_engine: Engine,
    run_id: str,
    program: Callable[..., ContainerSpec],
    serve: Callable[..., DockerServer],
) -> None:
    living = serve(program(IDLE))

    async def run() -> None:
        facts = await living.start()
        try:
            found = [item for item in list_leftovers(docker_engine) if item.run == run_id]
            assert [(item.kind, item.id, item.state) for item in found] == [(Kind.CONTAINER, killed, "running")]
            assert found[0].owner.pid != this_owner().pid
            removed = remove_leftovers(found)
            assert removed == found
            assert [item["Id"] for item in containers_of(docker_engine, run_id)] == [facts.container_id]
            assert docker_engine.client.containers.get(bystander).status == "created"
            assert remove_leftovers(found) == found, "what is gone already counts as removed"
        finally:
            await living.stop()

    asyncio.run(run())


def test_networks_too(docker_engine: Engine, run_id: str) -> None:
    gone = {**this_owner().labels(OWNER_LABEL), f"{OWNER_LABEL}.started": "1.0", RUN_LABEL: run_id}
    ours = {**this_owner().labels(OWNER_LABEL), RUN_LABEL: run_id}
    api = docker_engine.client.api
    left = api.create_network(f"{run_id}-left", labels=gone)["Id"]
    used = api.create_network(f"{run_id}-used", labels=ours)["Id"]
    try:
        found = [item for item in list_leftovers() if item.run == run_id]
        assert [(item.kind, item.id, item.name) for item in found] == [(Kind.NETWORK, left, f"{run_id}-left")]
        remove_leftovers(found)
        assert [network.id for network in docker_engine.client.networks.list(names=[run_id])] == [used]
    finally:
        api.remove_network(used)


def test_without_an_owner_nothing_is_removed(docker_engine: Engine, base_image: str, run_id: str) -> None:
    container = docker_engine.client.containers.create(base_image, ["true"], labels={RUN_LABEL: run_id})
    assert container.id is not None
    assert [item for item in list_leftovers(docker_engine) if item.run == run_id] == []
    remove_container(docker_engine, container.id)
    remove_container(docker_engine, container.id)


def test_removing_a_container_that_never_was(docker_engine: Engine) -> None:
    remove_container(docker_engine, uuid.uuid4().hex * 2)
