"""Renderer of containers as a compose file."""

from __future__ import annotations

from collections.abc import Mapping

import yaml

from vllm_repro.command.container import CAPABILITIES, SECURITY, ContainerSpec
from vllm_repro.secret_names import is_secret_name


def service(spec: ContainerSpec, *, profile: str | None = None) -> dict[str, object]:
    """Return a container as one service of a compose file.

    A secret variable has no value: compose takes it from its caller's environment. With `profile`,
    only `docker compose --profile NAME up` starts the service.
    """
    body: dict[str, object] = {
        "image": spec.image,
        "profiles": [profile] if profile else None,
        "entrypoint": [_escape(word) for word in spec.entrypoint or ()],
        "command": [_escape(word) for word in spec.argv],
        "init": spec.init,
        "cap_drop": ["ALL"],
        "cap_add": list(CAPABILITIES),
        "security_opt": [SECURITY],
        "environment": {
            name: None if is_secret_name(name) else _escape(value) for name, value in spec.env
        },
        "ports": [port.render() for port in spec.publish],
        "volumes": [
            {
                "type": "bind",
                "source": mount.source,
                "target": mount.target,
                "read_only": mount.readonly,
            }
            for mount in spec.mounts
        ],
        "ipc": spec.ipc,
        "shm_size": spec.shm_size,
        "network_mode": spec.network,
        "ulimits": {limit.name: {"soft": limit.soft, "hard": limit.hard} for limit in spec.ulimits},
    }
    if request := spec.gpu_request():
        device: dict[str, object] = {
            "driver": "cdi" if request.cdi else "nvidia",
            "capabilities": ["gpu"],
        }
        if request.device_ids:
            device["device_ids"] = list(request.device_ids)
        else:
            device["count"] = "all" if request.count == -1 else request.count
        body["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return {
        key: value
        for key, value in body.items()
        if key in ("command", "init") or value not in (None, [], {})
    }


def compose_text(services: Mapping[str, Mapping[str, object]], *, heading: str = "") -> str:
    """Return a compose file: `heading` as comments, then the services."""
    comment = "".join(f"# {line}\n" for line in heading.splitlines())
    document = {"services": {name: dict(body) for name, body in services.items()}}
    # In the given order of keys, and no line folded.
    return comment + yaml.dump(
        document,
        Dumper=_IndentedDumper,
        sort_keys=False,
        width=10**6,
        allow_unicode=True,
        default_flow_style=False,
    )


class _IndentedDumper(yaml.SafeDumper):
    """Dumper that indents lists below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent lists, too, which PyYAML by default leaves at the column of their key."""
        super().increase_indent(flow, False)


def _escape(text: str) -> str:
    """Double each dollar: compose replaces `$NAME`."""
    return text.replace("$", "$$")
