"""Container specs and the Docker SDK."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_repro.command.container import ContainerSpec, GpuRequest, Mount, Publish
from vllm_repro.servers.base import Exit
from vllm_repro.servers.docker_container import create_arguments, exit_of


def test_a_spec_reaches_the_sdk() -> None:
    arguments = create_arguments(
        ContainerSpec(
            image="vllm/vllm-openai:v0.20.2",
            argv=("model", "--flag"),
            name="n",
            env=(("A", "1"),),
            labels=(("l", "v"),),
            mounts=(Mount("/cache", "/root/.cache", readonly=True),),
            gpus="device=1,3",
            shm_size=1 << 30,
            ipc="host",
            publish=(Publish(18000),),
        )
    )
    assert arguments["image"] == "vllm/vllm-openai:v0.20.2"
    assert arguments["command"] == ["model", "--flag"]
    assert arguments["init"] is True
    assert arguments["ports"] == {"8000/tcp": ("127.0.0.1", 18000)}
    assert arguments["ipc_mode"] == "host"
    assert arguments["shm_size"] == 1 << 30
    assert "volumes" not in arguments, "of a missing source they make an empty folder on the host"
    assert "auto_remove" not in arguments, "the engine would remove the evidence"
    assert "entrypoint" not in arguments, "the image's own"
    assert arguments["mounts"][0]["Type"] == "bind"
    assert arguments["mounts"][0]["ReadOnly"] is True
    assert arguments["device_requests"][0]["DeviceIDs"] == ["1", "3"]
    assert "tty" not in arguments


@pytest.mark.parametrize(("gpus", "expected"), [("all", GpuRequest(-1)), ("2", GpuRequest(2))])
def test_gpus_by_count(gpus: str, expected: GpuRequest) -> None:
    (request,) = create_arguments(ContainerSpec(image="i", gpus=gpus))["device_requests"]
    assert (request["Count"], request["DeviceIDs"]) == (expected.count, [])
    assert request["Capabilities"] == [["gpu"]]
    assert "device_requests" not in create_arguments(ContainerSpec(image="i"))


@pytest.mark.parametrize(
    ("state", "code", "detail", "oom_killed", "lost"),
    [
        ({"ExitCode": 0, "OOMKilled": False, "Error": ""}, 0, "container exited 0", False, False),
        ({"ExitCode": 3, "OOMKilled": True}, 3, "container exited 3, OOM killed", True, False),
        ({"ExitCode": 128, "Error": "no\nluck"}, 128, "container exited 128: no luck", False, False),
        ({}, None, "the container was removed by somebody else", False, False),
        (None, None, "the Docker Engine does not answer, so nothing is known about the container", False, True),
    ],
)
def test_how_a_server_ended(
    state: dict[str, Any] | None, code: int | None, detail: str, oom_killed: bool, lost: bool
) -> None:
    ended = exit_of(state, 12.5)
    assert ended == Exit(code=code, detail=detail, at=12.5, oom_killed=oom_killed, lost=lost)
