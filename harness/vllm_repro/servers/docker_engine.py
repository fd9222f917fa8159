"""The Docker Engine: reaching it, what it can do, and what is in an image.

All calls here block; async callers put them into a thread.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import docker
import docker.errors

from vllm_repro.errors import InfraError
from vllm_repro.host.owner import this_owner
from vllm_repro.servers.docker_errors import ENGINE_ERRORS, explain

__all__ = [
    "OWNER_LABEL",
    "REHEARSAL_LABEL",
    "RUN_LABEL",
    "Engine",
    "ImageFacts",
    "connect",
    "image_facts",
    "missing_image",
    "our_labels",
    "repository_digest",
]

RUN_LABEL = "org.vllm-repro.run"
"""On every container and network of this package: nothing without it is ever listed or removed."""
OWNER_LABEL = "org.vllm-repro.owner"
"""Prefix of the labels that name the process which made it, see `vllm_repro.host.owner`."""
REHEARSAL_LABEL = "org.vllm-repro.rehearsal"

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_PING_TIMEOUT_S = 10
_CALL_TIMEOUT_S = 300
"""Creating and starting may take minutes: a large image on a slow disk, a GPU runtime that starts cold."""


@dataclass(frozen=True)
class Engine:
    """An engine that answered. Close it when done.

    host: as in DOCKER_HOST. local: on this machine, so that its 127.0.0.1 and its folders are ours. runtimes:
    "nvidia" is only there where it was registered; `--gpus` may work without it, and only a start tells.
    """

    client: docker.DockerClient = field(repr=False)
    host: str
    version: str
    api: str
    system: str
    runtimes: tuple[str, ...]
    local: bool

    def close(self) -> None:
        self.client.close()


@dataclass(frozen=True)
class ImageFacts:
    """What an image is. digest: `repository@sha256:…` as in the registry, else the image's own id, which only
    this engine knows. rehearsal: it holds the rehearsal engine and no vLLM.
    """

    name: str
    id: str
    digest: str
    labels: Mapping[str, str]
    entrypoint: tuple[str, ...]
    rehearsal: bool


def connect(environment: Mapping[str, str] | None = None) -> Engine:
    """The engine at DOCKER_HOST, or at the default socket. Raises `InfraError` where none answers."""
    variables = dict(os.environ if environment is None else environment)
    host = variables.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    client: docker.DockerClient | None = None
    try:
        _knock(host)
        client = docker.from_env(timeout=_PING_TIMEOUT_S, environment=variables)
        client.ping()
        version: dict[str, Any] = client.version()
        info: dict[str, Any] = client.info()
        client.api.timeout = _CALL_TIMEOUT_S
    except (*ENGINE_ERRORS, OSError, ValueError) as error:
        if client is not None:
            client.close()
        where = "" if variables.get("DOCKER_HOST") else ", or set DOCKER_HOST"
        raise InfraError(
            f"no Docker Engine answers at {host}: {_reason(error)}", hint=f"Start Docker{where}."
        ) from error
    return Engine(
        client,
        host,
        str(version.get("Version", "unknown")),
        str(version.get("ApiVersion", "unknown")),
        str(info.get("OperatingSystem", "unknown")),
        tuple(sorted(info.get("Runtimes") or ())),
        host.startswith(("unix://", "npipe://")) or urlsplit(host).hostname in _LOOPBACK,
    )


def image_facts(engine: Engine, image: str) -> ImageFacts:
    """What `image` is on this engine; nothing is pulled. Raises `InfraError` where it is not there."""
    try:
        inspected: dict[str, Any] = engine.client.images.get(image).attrs
    except docker.errors.ImageNotFound as error:
        raise missing_image(image) from error
    except ENGINE_ERRORS as error:
        raise explain(error, image) from error
    config: dict[str, Any] = inspected.get("Config") or {}
    labels: dict[str, str] = config.get("Labels") or {}
    return ImageFacts(
        image,
        str(inspected["Id"]),
        repository_digest(image, inspected.get("RepoDigests") or []) or str(inspected["Id"]),
        labels,
        tuple(config.get("Entrypoint") or ()),
        labels.get(REHEARSAL_LABEL) == "1",
    )


def missing_image(image: str) -> InfraError:
    """What to say of an image that is not there: ours are built, others are pulled."""
    ours = re.fullmatch(r"vllm-repro/(?P<kind>rehearsal|vllm-cpu)(?::(?P<version>\S+))?", image)
    if ours is None:
        hint = f"docker pull {image}"
    elif ours["kind"] == "rehearsal":
        hint = "Build it in a checkout: fixtures/images/build.sh rehearsal"
    else:
        hint = f"Build it in a checkout: fixtures/images/build.sh vllm-cpu {ours['version'] or 'VERSION'}"
    return InfraError(f"the image {image} is not on this machine", hint=hint)


def our_labels(run: str) -> dict[str, str]:
    """The labels of everything that this process makes in an engine for the run of that id."""
    return {RUN_LABEL: run, **this_owner().labels(OWNER_LABEL)}


def repository_digest(image: str, known: list[str]) -> str | None:
    """The digest that belongs to the repository in `image`: one image may be known under several."""
    repository = image.partition("@")[0]
    repository = re.sub(r":[^:/]+$", "", repository)
    return next((digest for digest in known if digest.partition("@")[0] == repository), known[0] if known else None)


def _knock(host: str) -> None:
    """Raises `OSError` where a unix socket takes no connection: the SDK says so at length and leaks its socket."""
    if host.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PING_TIMEOUT_S)
            probe.connect(host.removeprefix("unix://"))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:300]
