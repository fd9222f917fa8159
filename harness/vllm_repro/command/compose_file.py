"""A compose file of containers: what `docker run` of each `ContainerSpec` says, in compose's words. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_repro.command.compose_render import dump, escape
from vllm_repro.command.container import ContainerSpec
from vllm_repro.secret_names import is_secret_name

__all__ = ["compose_text", "service"]


def service(spec: ContainerSpec, *, profile: str | None = None) -> dict[str, object]:
    """One service. profile: it is only started by `docker compose --profile NAME up`."""
    body: dict[str, object] = {"image": spec.image}
    if profile:
        body["profiles"] = [profile]
    if spec.entrypoint:
        body["entrypoint"] = [escape(word) for word in spec.entrypoint]
    body["command"] = [escape(word) for word in spec.argv]
    body["init"] = spec.init
    if spec.env:
        body["environment"] = {key: None if is_secret_name(key) else escape(value) for key, value in spec.env}
    if spec.publish:
        body["ports"] = [port.render() for port in spec.publish]
    if spec.mounts:
        body["volumes"] = [
            {"type": "bind", "source": mount.source, "target": mount.target, "read_only": mount.readonly}
            for mount in spec.mounts
        ]
    if spec.ipc:
        body["ipc"] = spec.ipc
    if spec.shm_size is not None:
        body["shm_size"] = spec.shm_size
    if spec.network:
        body["network_mode"] = spec.network
    if spec.ulimits:
        body["ulimits"] = {limit.name: {"soft": limit.soft, "hard": limit.hard} for limit in spec.ulimits}
    if spec.cap_add:
        body["cap_add"] = list(spec.cap_add)
    if request := spec.gpu_request():
        device: dict[str, object] = {"driver": "nvidia", "capabilities": ["gpu"]}
        if request.device_ids:
            device["device_ids"] = list(request.device_ids)
        else:
            device["count"] = "all" if request.count == -1 else request.count
        body["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return body


def compose_text(services: Mapping[str, Mapping[str, object]], *, heading: str = "") -> str:
    """The file: `heading` as comments, then the services."""
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    return comment + dump({"services": {name: dict(body) for name, body in services.items()}})
