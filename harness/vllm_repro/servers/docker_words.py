"""Between this package's words and the Docker SDK's: a `ContainerSpec` on the way in, a container's state on
the way out. Pure.
"""

from __future__ import annotations

from typing import Any

from docker.types import DeviceRequest, Mount, Ulimit

from vllm_repro.command.container import ContainerSpec
from vllm_repro.servers.base import Exit

__all__ = ["create_arguments", "exit_of"]


def create_arguments(spec: ContainerSpec) -> dict[str, Any]:
    """Keyword arguments of `docker_client.containers.create` that make the container which `spec` renders."""
    # `--entrypoint` takes one word, so the others stand before the arguments, here as on the printed line.
    entrypoint = spec.entrypoint or ()
    arguments: dict[str, Any] = {
        "image": spec.image,
        "command": [*entrypoint[1:], *spec.argv],
        "environment": dict(spec.env),
        "labels": dict(spec.labels),
        "init": spec.init,
        # As mounts, never as volumes: of a source that is missing those make an empty folder on the host.
        "mounts": [Mount(m.target, m.source, type="bind", read_only=m.readonly) for m in spec.mounts],
        "ulimits": [Ulimit(name=u.name, soft=u.soft, hard=u.hard) for u in spec.ulimits],
        "cap_add": list(spec.cap_add),
        "ports": {f"{p.container_port}/tcp": (p.host_ip, p.host_port) for p in spec.publish},
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
        "working_dir": spec.workdir,
    }
    return arguments | {key: value for key, value in optional.items() if value is not None}


def exit_of(state: dict[str, Any] | None, at: float) -> Exit:
    """How a server ended, by the engine's `State`: empty where the container is gone, None for no engine."""
    if state is None:
        detail = "the Docker Engine does not answer, so nothing is known about the container"
        return Exit(None, detail, at, lost=True)
    if not state:
        return Exit(None, "the container was removed by somebody else", at)
    code = int(state["ExitCode"])
    oom_killed = bool(state.get("OOMKilled"))
    said = " ".join(str(state.get("Error") or "").split())
    detail = f"container exited {code}" + (", OOM killed" if oom_killed else "") + (f": {said}" if said else "")
    return Exit(code, detail, at, oom_killed=oom_killed)
