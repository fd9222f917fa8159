"""Orphans of a killed harness: ended by its guard, or by `clean`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import Harness
from tests.servers.docker_helpers import IDLE, containers_of
from vllm_repro.command.container import ContainerSpec
from vllm_repro.host.ports import free_port
from vllm_repro.host.processes import session_members
from vllm_repro.servers.docker import DockerServer
from vllm_repro.servers.docker_engine import OWNER_LABEL, RUN_LABEL, Engine, our_labels
from vllm_repro.servers.guard import Guard
from vllm_repro.servers.orphans import OrphanContainer, Orphans, end_orphans, orphan_containers

SERVE = """
import asyncio, sys, time
from pathlib import Path
from vllm_repro.evidence import Evidence
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.process import ProcessServer
log, port = sys.argv[1:]
program = [sys.executable, "-c", "import time; time.sleep(600)"]
server = ProcessServer(program, port=int(port), log=Path(log), env={}, kind=ServerKind.PROCESS, evidence=Evidence.CPU)
print(asyncio.run(server.start()).pid, flush=True)
time.sleep(600)
"""
SERVE_CONTAINER = """
import asyncio, sys, time
from pathlib import Path
from vllm_repro.command.container import ContainerSpec, Publish
from vllm_repro.evidence import Evidence
from vllm_repro.servers.docker import DockerServer
log, port, image, run, program = sys.argv[1:]
spec = ContainerSpec(image=image, entrypoint=("python3", "-c", program), publish=(Publish(int(port)),))
server = DockerServer(spec, log=Path(log), run=run, evidence=Evidence.CPU)
print(asyncio.run(server.start()).container_id, flush=True)
time.sleep(600)
"""


def started(tmp_path: Path, program: str, *more: str) -> tuple[subprocess.Popen[str], str]:
    """Return a harness that runs one server, and the line that it printed about it."""
    words = [sys.executable, "-c", program, str(tmp_path / "log"), str(free_port()), *more]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    harness = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    assert harness.stdout is not None
    return harness, harness.stdout.readline().strip()


def until(ended: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ended():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_guard_ends_the_server_of_a_killed_harness(tmp_path: Path) -> None:
    harness, pid = started(tmp_path, SERVE)
    with harness:
        assert session_members(int(pid))
        harness.kill()
    until(lambda: not session_members(int(pid)))


def test_without_its_guard_clean_ends_it_and_tells_whose_it_is(tmp_path: Path, harness: Harness) -> None:
    killed, pid = started(tmp_path, SERVE)
    with killed:
        for child in psutil.Process(killed.pid).children():
            if child.pid != int(pid):
                child.kill()
        killed.kill()
    assert f"left: process {pid}, started by pid {killed.pid} in {Path.cwd()}: " in harness("clean").out
    assert session_members(int(pid)), "clean without --yes touches nothing"
    assert f"removed: process {pid}" in harness("clean", "--yes").out
    assert not session_members(int(pid))
    assert "nothing is left" in harness("clean").out


def test_a_guard_that_is_released_or_killed_is_gone() -> None:
    guard = Guard()
    guard.release()
    guard.release()
    assert guard._popen.returncode == 0
    killed = Guard()
    killed._popen.kill()
    killed.release()


@pytest.fixture
def bystander(docker_engine: Engine, base_image: str) -> Iterator[str]:
    """Create a container of another tool with a label like ours."""
    container = docker_engine.client.containers.create(
        base_image, ["true"], labels={RUN_LABEL: "theirs", OWNER_LABEL: "theirs"}
    )
    assert container.id is not None
    yield container.id
    docker_engine.client.api.remove_container(container.id)


@pytest.mark.docker
@pytest.mark.alone  # an orphan is ended by any run that begins beside the test
def test_only_containers_without_an_owner_are_removed(
    bystander: str,
    base_image: str,
    docker_engine: Engine,
    run_id: str,
    program: Callable[..., ContainerSpec],
    serve: Callable[..., DockerServer],
) -> None:
    labels = our_labels(run_id)
    gone = {**labels, OWNER_LABEL: json.dumps({**json.loads(labels[OWNER_LABEL]), "started": 1.0})}
    orphan = docker_engine.client.containers.create(base_image, ["true"], labels=gone)
    unowned = docker_engine.client.containers.create(base_image, ["true"], labels={RUN_LABEL: run_id})
    living = serve(program(IDLE))

    def orphans() -> list[OrphanContainer]:
        return [one for one in orphan_containers(docker_engine) if one.run == run_id]

    async def run() -> None:
        facts = await living.start()
        try:
            found = orphans()
            assert [(one.id, one.state) for one in found] == [(orphan.id, "created")]
            assert f"started by pid {os.getpid()} for the run {run_id}" in str(found[0])
            end_orphans(Orphans(sessions=(), containers=tuple(found)))
            assert orphans() == []
            assert {one["Id"] for one in containers_of(docker_engine, run_id)} == {facts.container_id, unowned.id}
            assert docker_engine.client.containers.get(bystander).status == "created"
            end_orphans(Orphans(sessions=(), containers=tuple(found)))  # removed already: not an error
        finally:
            await living.stop()
            unowned.remove()

    asyncio.run(run())


@pytest.mark.docker
@pytest.mark.alone
def test_the_guard_removes_the_container_of_a_killed_harness(
    base_image: str, run_id: str, docker_engine: Engine, tmp_path: Path
) -> None:
    harness, container = started(tmp_path, SERVE_CONTAINER, base_image, run_id, IDLE)
    with harness:
        assert [one["Id"] for one in containers_of(docker_engine, run_id)] == [container]
        harness.kill()
    until(lambda: not containers_of(docker_engine, run_id))
