"""A command as a compose file."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Mapping, Sequence

import yaml

from vllm_repro.command.docker_run import Container
from vllm_repro.secret_names import is_secret_name

__all__ = ["dump", "dump_compose", "escape"]


def dump_compose(service: str, container: Container, argv: Sequence[str]) -> str:
    """A compose file with one service. Variables that look like secrets are taken from the caller's
    environment."""
    body: dict[str, object] = {"image": container.image}
    if container.name:
        body["container_name"] = container.name
    entrypoint = (*container.entrypoint, *container.program)
    if entrypoint:
        body["entrypoint"] = [escape(word) for word in entrypoint]
    body["command"] = [escape(word) for word in argv]
    environment: dict[str, str | None] = {}
    for key, value in container.env:
        passed_on = value in {f"${key}", f"${{{key}}}"} or is_secret_name(key)
        environment[key] = None if passed_on else escape(value)
    lists: dict[str, list[object]] = {
        "ports": list(container.ports),
        "volumes": [*container.volumes, *(_volume(mount) for mount in container.mounts)],
    }
    scalars = {
        "ipc": container.ipc,
        "shm_size": container.shm_size,
        "network_mode": container.network,
        "runtime": container.runtime,
    }
    if environment:
        body["environment"] = environment
    body.update({key: values for key, values in lists.items() if values})
    body.update({key: value for key, value in scalars.items() if value})
    if container.init:
        body["init"] = True
    if container.ulimits:
        body["ulimits"] = dict(_ulimit(limit) for limit in container.ulimits)
    if container.gpus is not None:
        body["deploy"] = {"resources": {"reservations": {"devices": [_gpu_device(container.gpus)]}}}
    text = dump({"services": {service: body}})
    # What compose cannot say must not get lost without a word.
    left_out = f"# not said here: {shlex.join(container.other)}\n" if container.other else ""
    return left_out + text


def dump(document: Mapping[str, object]) -> str:
    """YAML as people write compose files: keys in the given order, no line folded."""
    return yaml.dump(
        document, Dumper=_IndentedDumper, sort_keys=False, width=10**6, allow_unicode=True, default_flow_style=False
    )


class _IndentedDumper(yaml.SafeDumper):
    """Lists stand further in than their key, as people write compose files."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _volume(mount: str) -> dict[str, object]:
    """A value of `--mount` in compose's long form."""
    names = {
        "src": "source",
        "dst": "target",
        "destination": "target",
        "ro": "read_only",
        "readonly": "read_only",
    }
    volume: dict[str, object] = {}
    for part in next(csv.reader([mount])):
        key, _, value = part.partition("=")
        key = names.get(key, key)
        volume[key] = value not in {"false", "0"} if key == "read_only" else value
    return volume


def _ulimit(text: str) -> tuple[str, object]:
    name, _, limits = text.partition("=")
    soft, colon, hard = limits.partition(":")
    return name, {"soft": int(soft), "hard": int(hard)} if colon else int(soft)


def _gpu_device(gpus: str) -> dict[str, object]:
    device: dict[str, object] = {"driver": "nvidia"}
    if gpus.startswith("device="):
        device["device_ids"] = gpus.removeprefix("device=").split(",")
    else:
        device["count"] = int(gpus) if gpus.isdecimal() else gpus
    device["capabilities"] = ["gpu"]
    return device


def escape(text: str) -> str:
    """Compose replaces `$NAME`; a doubled dollar is a plain one."""
    return text.replace("$", "$$")
