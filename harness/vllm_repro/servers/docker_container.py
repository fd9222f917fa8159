"""A container in the terms of the Docker SDK: the arguments that create it, its last state, and its streams."""

from __future__ import annotations

import contextlib
from typing import Any

from docker.types import DeviceRequest, Mount, Ulimit

from vllm_repro.command.container import LOOPBACK, ContainerSpec
from vllm_repro.servers.base import Exit
from vllm_repro.servers.docker_engine import engine_errors

__all__ = ["close", "create_arguments", "exit_of"]


def create_arguments(spec: ContainerSpec) -> dict[str, Any]:
    """Return the arguments of `DockerClient.containers.create` for the container that `spec` renders."""
    # `--entrypoint` takes one word, so the others come before the arguments, as in `docker run`.
    entrypoint = spec.entrypoint or ()
    arguments: dict[str, Any] = {
        "image": spec.image,
        "command": [*entrypoint[1:], *spec.argv],
        "environment": dict(spec.env),
        "labels": dict(spec.labels),
        "init": spec.init,
        # Mounts, not volumes: for a missing source a volume creates an empty folder on the host.
        "mounts": [Mount(m.target, m.source, type="bind", read_only=m.readonly) for m in spec.mounts],
        "ulimits": [Ulimit(name=u.name, soft=u.soft, hard=u.hard) for u in spec.ulimits],
        "ports": {f"{p.container_port}/tcp": (LOOPBACK, p.host_port) for p in spec.publish},
    }
    if (request := spec.gpu_request()) is not None:
        asked: dict[str, Any] = {"count": request.count}
        if request.count is None:
            asked = {"device_ids": list(request.device_ids)}
        arguments["device_requests"] = [DeviceRequest(capabilities=[["gpu"]], **asked)]
    optional: dict[str, Any] = {
        "name": spec.name,
        "network_mode": spec.network,
        "shm_size": spec.shm_size,
        "ipc_mode": spec.ipc,
        "entrypoint": list(entrypoint[:1]) or None,
    }
    return arguments | {key: value for key, value in optional.items() if value is not None}


def exit_of(state: dict[str, Any] | None, at: float) -> Exit:
    """Return how a server ended. state: from the engine; empty if the container is gone, None if no engine answers."""
    if state is None:
        detail = "the Docker Engine does not answer, so nothing is known about the container"
        return Exit(code=None, detail=detail, at=at, lost=True)
    if not state:
        return Exit(code=None, detail="the container was removed by somebody else", at=at)
    code = int(state["ExitCode"])
    oom_killed = bool(state.get("OOMKilled"))
    error = " ".join(str(state.get("Error") or "").split())
    detail = f"container exited {code}" + (", OOM killed" if oom_killed else "") + (f": {error}" if error else "")
    return Exit(code=code, detail=detail, at=at, oom_killed=oom_killed)


def close(stream: Any) -> None:
    """Close the connection of a stream. May be called again, and with None."""
    # The SDK raises AttributeError if the other side closed it first.
    with contextlib.suppress(AttributeError, OSError, *engine_errors()):
        stream.close()
    # The SDK wakes the reader but keeps the descriptor, which only the response frees.
    response = getattr(stream, "_response", None)
    if response is not None:
        response.close()
