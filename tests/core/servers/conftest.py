"""Real Docker Engine for tests marked `docker`, and small programs for containers."""

from __future__ import annotations

import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.core.servers.docker_helpers import containers_of, engine_or_reason
from vllm_repro.command.container import ContainerSpec, Publish
from vllm_repro.host.ports import free_port
from vllm_repro.servers.docker import DockerServer
from vllm_repro.servers.docker_engine import Engine
from vllm_repro_diagnosis.evidence import Evidence

BUILD = Path(__file__).parents[3] / "fixtures" / "images" / "build.sh"


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[Engine]:
    engine = engine_or_reason(os.environ)
    yield engine
    engine.close()


def build(*words: str) -> str:
    """Build an image of ours unless it is up to date, and return its name."""
    done = subprocess.run(
        [str(BUILD), *words],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.strip()


@pytest.fixture(scope="session")
def base_image(docker_engine: Engine) -> str:
    """Return an image with Python and no server."""
    assert docker_engine.local
    return build("base")


@pytest.fixture(scope="session")
def rehearsal_image(base_image: str) -> str:
    assert base_image
    return build("rehearsal")


@pytest.fixture
def run_id(docker_engine: Engine) -> Iterator[str]:
    """Return a run id of which no container may be left after the test."""
    run = f"test-{uuid.uuid4().hex[:12]}"
    yield run
    left = containers_of(docker_engine, run)
    for container in left:
        docker_engine.client.api.remove_container(container["Id"], force=True)
    assert left == [], "the test left a container behind"


@pytest.fixture
def program(base_image: str) -> Callable[..., ContainerSpec]:
    """Return the spec of a container that runs Python source."""

    def make(source: str, **fields: Any) -> ContainerSpec:
        given = {
            "image": base_image,
            "entrypoint": ("python3", "-u", "-c", source),
            "publish": (Publish(free_port()),),
        }
        return ContainerSpec(**(given | fields))

    return make


@pytest.fixture
def serve(tmp_path: Path, run_id: str) -> Callable[..., DockerServer]:
    """Return a server for a spec, with the evidence of a plain CPU."""

    def make(spec: ContainerSpec, **fields: Any) -> DockerServer:
        given: dict[str, Any] = {
            "log": tmp_path / "server.log",
            "run": run_id,
            "evidence": Evidence.CPU,
            "grace": 5.0,
        }
        return DockerServer(spec, **({"port": spec.publish[0].host_port} | given | fields))

    return make
