"""The printed `docker run` line creates the same container as the API call."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vllm_repro.command.container import ContainerSpec, Mount, Publish, Ulimit
from vllm_repro.servers.docker import create_arguments
from vllm_repro.servers.docker_engine import RUN_LABEL, Engine, remove_container

pytestmark = pytest.mark.docker

# Of the terminal that `docker run` shows the output on, and a container's own name for itself.
OF_THE_CLIENT = {
    "AttachStdin",
    "AttachStdout",
    "AttachStderr",
    "OpenStdin",
    "StdinOnce",
    "Tty",
    "ConsoleSize",
    "Hostname",
}

ODD_WORDS = (
    "--speculative-config",
    '{"method": "mtp", "n": 1}',
    "it's",
    "",
    "$HOME",
    "a\nb",
    "ü",
    "-x",
    "--flag=1 2",
)


def specs() -> dict[str, ContainerSpec]:
    plain = ContainerSpec(image="IMAGE", publish=(Publish(18000),))
    return {
        "plain": plain,
        "arguments": replace(plain, argv=ODD_WORDS),
        "environment": replace(plain, env=(("A", "b c"), ("EMPTY", ""), ("ODD", "x='$y'\"\\"))),
        "all GPUs": replace(plain, gpus="all"),
        "a count of GPUs": replace(plain, gpus="2"),
        "one GPU": replace(plain, gpus="device=0"),
        "GPUs by id": replace(plain, gpus="device=1,3"),
        "memory": replace(plain, ipc="host", shm_size=16 << 30),
        "odd shared memory": replace(plain, shm_size=(10 << 30) + 1),
        "mounts": replace(
            plain, mounts=(Mount("FOLDER", "/models/a", readonly=True), Mount("FOLDER, odd", "/b"))
        ),
        "host network": replace(plain, network="host", publish=()),
        "ports": replace(plain, publish=(Publish(18000), Publish(18001, 9000))),
        "entrypoint": replace(
            plain, entrypoint=("python3", "-m", "vllm.entrypoints.openai.api_server"), argv=("--x",)
        ),
        "one word of entrypoint": replace(plain, entrypoint=("vllm",)),
        "no init": replace(plain, init=False),
        "limits": replace(plain, ulimits=(Ulimit("memlock", -1, -1), Ulimit("nofile", 10, 20))),
    }


def settings(engine: Engine, container: str) -> dict[str, Any]:
    """Return {dotted name: value} of all non-empty container settings."""
    attributes = engine.client.containers.get(container).attrs
    flat: dict[str, Any] = {"Path": attributes["Path"], "Args": attributes["Args"]}
    for part in ("Config", "HostConfig"):
        for key, value in attributes[part].items():
            if value and key not in OF_THE_CLIENT:
                flat[f"{part}.{key}"] = value
    # Two spellings of the same: no restarts, an order without meaning, and nothing at all.
    if flat["HostConfig.RestartPolicy"]["Name"] == "no":
        flat["HostConfig.RestartPolicy"]["Name"] = ""
    flat["Config.Env"] = sorted(flat["Config.Env"])
    for request in flat.get("HostConfig.DeviceRequests", ()):
        request.update({key: value or None for key, value in request.items()})
    return flat


@pytest.mark.parametrize("name", specs())
def test_the_printed_line_makes_the_same_container(
    name: str, docker_engine: Engine, rehearsal_image: str, run_id: str, tmp_path: Path
) -> None:
    def at(source: str) -> str:
        folder = tmp_path / source
        folder.mkdir(exist_ok=True)
        return str(folder)

    spec = specs()[name]
    spec = replace(
        spec,
        image=rehearsal_image,
        labels=((RUN_LABEL, run_id),),
        mounts=tuple(replace(mount, source=at(mount.source)) for mount in spec.mounts),
    )
    # A shell reads the line, as when it is pasted; only `run` becomes `create`.
    script = 'docker() { shift; command docker create "$@"; }\n' + spec.render()
    environment = {
        "DOCKER_HOST": docker_engine.host,
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
    }
    printed = subprocess.run(
        ["sh", "-c", script], stdout=subprocess.PIPE, text=True, check=True, env=environment
    ).stdout.strip()
    created = docker_engine.client.containers.create(**create_arguments(spec))
    assert created.id is not None
    try:
        assert settings(docker_engine, created.id) == settings(docker_engine, printed)
    finally:
        remove_container(docker_engine, printed)
        remove_container(docker_engine, created.id)


def test_every_field_of_a_spec_is_compared() -> None:
    """Check that each field of a spec is compared here."""
    default = ContainerSpec(image="IMAGE")
    varied = {
        field
        for spec in specs().values()
        for field, value in vars(spec).items()
        if value != vars(default)[field]
    }
    # by each test, by each test, and as one container of a name
    assert varied | {"image", "labels", "name"} == set(vars(default)), json.dumps(sorted(varied))
