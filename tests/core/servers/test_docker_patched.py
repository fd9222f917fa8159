"""Patched source over an image on a real engine."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.core.servers.docker_helpers import containers_of, running, until_logged
from tests.fake_package import BEFORE, FILE, PATCH, PROGRAM
from vllm_repro.command.container import ContainerSpec, Publish
from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.host.ports import free_port
from vllm_repro.servers.base import Patched
from vllm_repro.servers.docker import DockerServer
from vllm_repro.servers.docker_engine import Engine
from vllm_repro.servers.docker_source import image_source
from vllm_repro.servers.overlay import patch_image

pytestmark = [pytest.mark.docker, pytest.mark.anyio]

DIGEST = hashlib.sha256(b"ANSWER = 42\n").hexdigest()

# A vLLM in a place of its own, whose compiled file is of another text and taken unasked.
INSTALL = f"""
import pathlib, py_compile
home = pathlib.Path("/opt/odd/packages")
(home / "vllm").mkdir(parents=True)
(home / "vllm" / "__init__.py").touch()
file = home / {FILE!r}
file.write_text("ANSWER = 7\\n")
py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
file.write_text({BEFORE!r})
python = pathlib.Path("/opt/odd/python3")
python.write_text(
    '#!/bin/sh\\nPYTHONPATH="$PYTHONPATH:/opt/odd/packages" exec /usr/bin/python3 "$@"\\n'
)
script = pathlib.Path("/usr/bin/vllm")
script.write_text("#!/bin/env /opt/odd/python3\\n" + {PROGRAM!r} + "time.sleep(600)\\n")
for file in (python, script):
    file.chmod(0o755)
"""


@pytest.fixture(scope="module")
def image(docker_engine: Engine, base_image: str) -> Iterator[str]:
    """Return an image with a fake vLLM."""
    name = f"vllm-repro/test-patched:{uuid.uuid4().hex[:8]}"
    made = docker_engine.client.containers.create(base_image, ["python3", "-c", INSTALL])
    try:
        made.start()
        assert made.wait()["StatusCode"] == 0, made.logs()
        repository, tag = name.split(":")
        made.commit(repository, tag)
    finally:
        made.remove(force=True)
    yield name
    docker_engine.client.images.remove(name, force=True)


@pytest.fixture
def spec(image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContainerSpec:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path / "cache"))
    return ContainerSpec(image=image, entrypoint=("vllm",), publish=(Publish(free_port()),))


def test_an_image_is_asked_by_the_python_of_its_command(
    docker_engine: Engine, spec: ContainerSpec, run_id: str
) -> None:
    source = image_source(docker_engine, spec, [FILE, "vllm/absent.py"], run_id)
    assert source.files.keys() == {FILE}
    assert source.files[FILE].path == "/opt/odd/packages/vllm/answer.py"
    assert (
        source.files[FILE].compiled == "/opt/odd/packages/vllm/__pycache__/answer.cpython-311.pyc"
    )
    assert (source.files[FILE].text, containers_of(docker_engine, run_id)) == (BEFORE, [])


async def test_the_server_runs_the_changed_file(
    docker_engine: Engine, spec: ContainerSpec, run_id: str, serve: Callable[..., DockerServer]
) -> None:
    source = patch_image(image_source(docker_engine, spec, [FILE], run_id), [PATCH], print)
    changed = replace(spec, mounts=source.mounts, env=tuple(source.env.items()))
    server = serve(changed, patched=source.digests)
    async with running(server) as started:
        await until_logged(server, "ANSWER 42")
        facts = await asyncio.to_thread(server.booted, started, ready=True)
    assert facts.patched == (Patched(file=FILE, sha256=DIGEST),)


def test_an_image_without_a_vllm_is_unsupported(
    docker_engine: Engine, base_image: str, rehearsal_image: str, run_id: str
) -> None:
    with pytest.raises(Unsupported, match="finds no vLLM whose source could be changed"):
        image_source(docker_engine, ContainerSpec(image=base_image), [FILE], run_id)
    with pytest.raises(Unsupported, match="holds the rehearsal engine, and no vLLM"):
        image_source(docker_engine, ContainerSpec(image=rehearsal_image), [FILE], run_id)


def test_an_image_that_cannot_be_asked_is_infra(
    docker_engine: Engine, base_image: str, run_id: str
) -> None:
    deaf = ContainerSpec(image=base_image, env=(("PYTHONHOME", "/nowhere"),))
    with pytest.raises(InfraError, match="does not say where its vLLM is"):
        image_source(docker_engine, deaf, [FILE], run_id)
    assert containers_of(docker_engine, run_id) == []
