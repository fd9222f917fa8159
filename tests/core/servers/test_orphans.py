"""Orphans of a killed harness: ended by its guard, or by `clean`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.conftest import Harness
from tests.core.servers.docker_helpers import IDLE, containers_of, running
from vllm_repro.command.container import ContainerSpec
from vllm_repro.host.lease import Lease, lease_folder
from vllm_repro.host.ports import free_port
from vllm_repro.host.processes import session_members
from vllm_repro.servers.docker import DockerServer
from vllm_repro.servers.docker_engine import LEASE_LABEL, RUN_LABEL, Engine
from vllm_repro.servers.orphans import sweep

SERVE = """
import asyncio, sys, time
from pathlib import Path
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.process import ProcessServer
log, port = sys.argv[1:]
code = "import tempfile, time; print(tempfile.mkdtemp(), flush=True); time.sleep(600)"
program, kind = [sys.executable, "-c", code], ServerKind.PROCESS
server = ProcessServer(
    program, port=int(port), log=Path(log), env={}, kind=kind, evidence=Evidence.CPU
)
pid = asyncio.run(server.start()).pid
while not Path(log).read_text():
    time.sleep(0.02)
print(pid, flush=True)
time.sleep(600)
"""
SERVE_CONTAINER = """
import asyncio, sys, time
from pathlib import Path
from vllm_repro.command.container import ContainerSpec, Publish
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro.servers.docker import DockerServer
log, port, image, run, program = sys.argv[1:]
publish = (Publish(int(port)),)
spec = ContainerSpec(image=image, entrypoint=("python3", "-c", program), publish=publish)
server = DockerServer(spec, port=int(port), log=Path(log), run=run, evidence=Evidence.CPU)
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


def kill_with_guard(harness: subprocess.Popen[str], server: str) -> None:
    for child in psutil.Process(harness.pid).children():
        if str(child.pid) != server:
            child.kill()
    harness.kill()


def test_without_its_guard_clean_ends_it_and_tells_whose_it_is(
    tmp_path: Path, harness: Harness
) -> None:
    killed, pid = started(tmp_path, SERVE)
    assert "nothing is left" in harness("clean", "--yes").out
    with killed:
        kill_with_guard(killed, pid)
    assert (
        f"left: process {pid}, started by pid {killed.pid} in {Path.cwd()}: "
        in harness("clean").out
    )
    assert session_members(int(pid)), "clean without --yes touches nothing"
    temporary = Path((tmp_path / "log").read_text(encoding="utf-8").strip())
    assert temporary.exists()
    assert f"removed: process {pid}" in harness("clean", "--yes").out
    assert not session_members(int(pid))
    assert not temporary.parent.exists()
    assert "nothing is left" in harness("clean").out
    assert list(lease_folder().iterdir()) == []


@pytest.mark.parametrize(
    ("log", "named"),
    [
        ("vllm-repro-server-a1/logs/server-1.log", True),
        ("vllm-repro-server-/logs/server-1.log", True),
        ("vllm-repro-server-x y/logs/server-1.log", True),
        ("vllm-repro-server-running/logs/server-1.log", False),
        ("vllm-repro-server-a1/server-1.log", False),
        ("someone-elses/logs/server-1.log", False),
    ],
)
def test_clean_names_the_logs_of_dead_engines(
    tmp_path: Path, harness: Harness, monkeypatch: pytest.MonkeyPatch, log: str, named: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / log).parent.mkdir(parents=True)
    with (
        (tmp_path / log).open("w", encoding="utf-8") as file,
        subprocess.Popen(
            ["sleep", "60"], stdout=file if "running" in log else None, start_new_session=True
        ) as program,
    ):
        for words in (("clean",), ("clean", "--yes")):
            folder = (tmp_path / log).parents[1]
            assert (f"in {folder}; rm -r" in harness(*words).out) is named
            assert (tmp_path / log).exists(), "an observation is not lost"
        program.kill()


def test_a_guard_that_was_killed_is_replaced() -> None:
    first, second = Lease("first"), Lease("second")
    assert second._guard is first._guard, "one guard for all servers"
    first._guard.kill()
    first._guard.wait()
    third = Lease("third")
    assert third._guard.poll() is None
    for lease in (first, second, third):
        lease.release()


@pytest.fixture
def bystander(docker_engine: Engine, base_image: str) -> Iterator[str]:
    """Create a container of another tool with labels like ours."""
    labels = {RUN_LABEL: "theirs", LEASE_LABEL: "theirs"}
    container = docker_engine.client.containers.create(base_image, ["true"], labels=labels)
    assert container.id is not None
    yield container.id
    docker_engine.client.api.remove_container(container.id)


@pytest.mark.docker
@pytest.mark.anyio
async def test_only_containers_whose_owner_is_gone_are_removed(
    bystander: str,
    base_image: str,
    docker_engine: Engine,
    run_id: str,
    program: Callable[..., ContainerSpec],
    serve: Callable[..., DockerServer],
    tmp_path: Path,
) -> None:
    unleased = docker_engine.client.containers.create(
        base_image, ["true"], labels={RUN_LABEL: run_id}
    )
    killed, orphan = started(tmp_path, SERVE_CONTAINER, base_image, run_id, IDLE)
    living = serve(program(IDLE))
    try:
        async with running(living) as facts:
            assert sweep() == [], "all owners live"
            with killed:
                kill_with_guard(killed, orphan)
            (line,) = sweep()
            by = f"running), started by pid {killed.pid} in {Path.cwd()} for the run {run_id}"
            assert by in line
            assert sweep() == []
            left = {container["Id"] for container in containers_of(docker_engine, run_id)}
            assert left == {facts.container_id, unleased.id}
            assert docker_engine.client.containers.get(bystander).status == "created"
    finally:
        unleased.remove()
