"""The Docker Engine: connection, facts about it and its images, errors, removal. All calls block.

The Docker SDK takes 0.3 s to import. So functions import it, once a Docker Engine answers.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vllm_repro.command.container import CDI, GpuRequest
from vllm_repro.errors import InfraError, ReproError, Unsupported
from vllm_repro.host.lease import Lease

if TYPE_CHECKING:
    import docker
    from docker.types import DeviceRequest

RUN_LABEL = "org.vllm-repro.run"
"""Id of the run, on every container of this package."""
LEASE_LABEL = "org.vllm-repro.lease"
"""Name of the container's lease (`vllm_repro.host.lease`)."""
REHEARSAL_LABEL = "org.vllm-repro.rehearsal"
"""`1` on an image that holds the rehearsal engine."""

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_PING_TIMEOUT_S = 10
_CALL_TIMEOUT_S = 300
"""Creating and starting may take minutes: a large image on a slow disk, a cold GPU runtime."""
_REMOVAL_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Connection to a Docker Engine that answers. Close it when done."""

    client: docker.DockerClient = field(repr=False)
    # as in DOCKER_HOST
    host: str
    version: str
    # on this machine, with the same 127.0.0.1 and the same folders
    local: bool

    def close(self) -> None:
        """Close the connection to the Docker Engine."""
        self.client.close()


@dataclass(frozen=True, kw_only=True)
class ImageFacts:
    """Facts about a Docker image: name, digest, and whether it holds the rehearsal engine."""

    name: str
    # `repository@sha256:…` as in the registry, else the image's id
    digest: str
    # the image holds the rehearsal engine
    rehearsal: bool


def engine_errors() -> tuple[type[Exception], type[Exception]]:
    """Return the exception types of the Docker SDK, for `except`: the engine refuses or is gone."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    return DockerException, RequestException


def connect(environment: Mapping[str, str] | None = None) -> Engine:
    """Connect to the Docker Engine at DOCKER_HOST or at the default socket.

    Raises `InfraError` if none answers.
    """
    variables = dict(os.environ if environment is None else environment)
    host = variables.get("DOCKER_HOST") or "unix:///var/run/docker.sock"

    def refusal(error: Exception) -> InfraError:
        remedy = (
            "Join the group docker and log in again"
            if isinstance(error, PermissionError)
            else "Start Docker"
        )
        where = "" if variables.get("DOCKER_HOST") else ", or set DOCKER_HOST"
        return InfraError(
            f"no Docker Engine answers at {host}: {_reason(error)}", hint=f"{remedy}{where}."
        )

    try:
        _check_socket(host)
    except OSError as error:
        raise refusal(error) from error
    import docker

    client: docker.DockerClient | None = None
    try:
        client = docker.from_env(timeout=_PING_TIMEOUT_S, environment=variables)
        client.ping()
        version: dict[str, Any] = client.version()
        client.api.timeout = _CALL_TIMEOUT_S
    except (*engine_errors(), OSError, ValueError) as error:
        if client is not None:
            client.close()
        raise refusal(error) from error
    return Engine(
        client=client,
        host=host,
        version=str(version.get("Version", "unknown")),
        local=host.startswith(("unix://", "npipe://")) or urlsplit(host).hostname in _LOOPBACK,
    )


def image_facts(engine: Engine, image: str) -> ImageFacts:
    """Return the digest of a local `image`, and whether it holds the rehearsal engine.

    Pull nothing: raises `InfraError` if the Docker Engine does not have the image.
    """
    from docker.errors import ImageNotFound

    try:
        inspected: dict[str, Any] = engine.client.images.get(image).attrs
    except ImageNotFound as error:
        raise missing_image(image) from error
    except engine_errors() as error:
        raise explain(error) from error
    labels: dict[str, str] = (inspected.get("Config") or {}).get("Labels") or {}
    return ImageFacts(
        name=image,
        digest=repository_digest(image, inspected.get("RepoDigests") or []) or str(inspected["Id"]),
        rehearsal=labels.get(REHEARSAL_LABEL) == "1",
    )


def missing_image(image: str) -> InfraError:
    """Return the error for a missing image, with the command that pulls or builds it."""
    name, _, version = image.removeprefix("vllm-repro/").partition(":")
    hint = f"docker pull {image}"
    if image.startswith("vllm-repro/"):
        hint = f"Build it in a checkout: fixtures/images/build.sh {name}" + (
            f" {version}" if name == "vllm-cpu" else ""
        )
    return InfraError(f"the image {image} is not on this machine", hint=hint)


def repository_digest(image: str, known: list[str]) -> str | None:
    """Return the digest of `known` with the repository of the image name `image`, else the first.

    Return None if `known` is empty. known: as `repository@sha256:…`.
    """
    repository = image.partition("@")[0]
    repository = re.sub(r":[^:/]+$", "", repository)
    return next(
        (digest for digest in known if digest.partition("@")[0] == repository),
        known[0] if known else None,
    )


def _check_socket(host: str) -> None:
    """Raise `OSError` if Docker's unix socket accepts no connection; skip other addresses.

    The SDK's own error is long, and it leaks the socket.
    """
    if host.startswith("unix://"):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PING_TIMEOUT_S)
            probe.connect(host.removeprefix("unix://"))


def _reason(error: Exception) -> str:
    """Return why the Docker Engine did not answer, in one short line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:300]


_TOOLKIT = (
    "Install the NVIDIA Container Toolkit, run `nvidia-ctk runtime configure --runtime=docker` and"
    " restart Docker. `docker run --rm --gpus all --entrypoint nvidia-smi IMAGE` tests it."
)
_DRIVER = "The host's driver does not work: `nvidia-smi` on the host shows it. Reload it or reboot."
_UNKNOWN = (
    "`nvidia-smi -L` lists the cards. After a change of driver or cards: `nvidia-ctk cdi generate`,"
    " and restart Docker."
)
_OLD = (
    "The host's driver is older than the image's CUDA: update it, or name an image of an older CUDA"
    " with --image."
)
_PRIVILEGE = (
    "Use an engine that runs as root with all capabilities, or an arm whose command does not ask"
    " for them."
)
_PORT = "Run it again: another free port is taken."
_REFUSALS: tuple[tuple[str, type[ReproError], str], ...] = (
    (r"unsatisfied condition|requirement error", Unsupported, _OLD),
    (r"unknown device|unresolvable cdi devices|adding custom device", InfraError, _UNKNOWN),
    (r"driver not loaded|nvml error|load library failed|driver rpc error", InfraError, _DRIVER),
    (
        r"could not select device driver|unknown runtime|unknown or invalid runtime name",
        Unsupported,
        _TOOLKIT,
    ),
    (
        (
            r"nvidia-container-cli|running (pre|create\w*|start\w*)? ?hook|prestart"
            r" hook|createruntime hook"
        ),
        Unsupported,
        _TOOLKIT,
    ),
    (r"setting rlimit|unable to apply caps|can't get final child's pid", Unsupported, _PRIVILEGE),
    (
        r"port is already allocated|address already in use|ports are not available",
        InfraError,
        _PORT,
    ),
)
"""Texts in refusals of a Docker Engine, in lower case; the error for each, and what to do.

The first match counts.
"""


def explain(error: Exception) -> ReproError:
    """Turn an error of the Docker SDK into this package's own, with a hint on what to do."""
    from docker.errors import APIError

    text = error.explanation if isinstance(error, APIError) and error.explanation else str(error)
    words = " ".join(str(text).split())
    if not isinstance(error, APIError):
        return InfraError(
            f"the Docker Engine does not answer: {words}",
            hint="Is it running? `docker info` asks it.",
        )
    matches = (row for row in _REFUSALS if re.search(row[0], words.lower()))
    _, kind, hint = next(matches, ("", InfraError, ""))
    return kind(f"the Docker Engine refuses: {words}", hint=hint)


def device_request(request: GpuRequest) -> DeviceRequest:
    """Return a request of GPUs in the form that the Docker SDK takes."""
    from docker.types import DeviceRequest

    if request.count is not None:
        return DeviceRequest(capabilities=[["gpu"]], count=request.count)
    ids = list(request.device_ids)
    return (
        DeviceRequest(driver="cdi", device_ids=ids)
        if request.cdi
        else DeviceRequest(capabilities=[["gpu"]], device_ids=ids)
    )


def gpu_prefix(engine: Engine, image: str | None = None) -> str:
    """Return what Docker needs before a GPU's index: `nvidia.com/gpu=` with CDI, else nothing.

    NVIDIA's hook and runtime need nothing.

    No field of the engine shows which it accepts, so a container of `image`, by default of any, is
    started for a moment. Raises `Unsupported` or `InfraError` with the Docker Engine's message if
    it accepts neither, and `InfraError` if it has no image.
    """
    try:
        images = engine.client.images.list() if image is None else []
        name = image or next((local_image.id for local_image in images), None)
        if name is None:
            raise InfraError(
                "the engine has no image to try a GPU request with", hint="pull the image first"
            )
        refused = _gpu_refusal(engine, name, GpuRequest(-1))
        if refused is None:
            return ""
        if "could not select device driver" in str(refused) and not _gpu_refusal(
            engine, name, GpuRequest(None, (f"{CDI}all",))
        ):
            return CDI
    except engine_errors() as error:
        raise explain(error) from error
    raise explain(refused) from refused


def _gpu_refusal(engine: Engine, image: str, request: GpuRequest) -> Exception | None:
    """Return Docker's error for this GPU `request`; None if it accepts the request.

    Start and remove a container. Raises one of `engine_errors` if Docker does not answer.
    """
    from docker.errors import APIError

    lease = Lease("a container that tries a GPU request")
    container = None
    try:
        container = engine.client.containers.create(
            image,
            entrypoint=["true"],
            device_requests=[device_request(request)],
            labels={LEASE_LABEL: lease.path.name, RUN_LABEL: "gpu-request"},
            network_mode="none",
        )
        container.start()
    except APIError as error:
        # An image without `true` fails here too, but its request was accepted.
        return error if explain(error).hint in (_TOOLKIT, _DRIVER, _UNKNOWN, _OLD) else None
    finally:
        if container is not None:
            remove_container(engine, str(container.id))
        lease.release()
    return None


def remove_container(engine: Engine, container: str) -> None:
    """Kill and remove a container with its unnamed volumes; return when it is gone.

    One that is gone already is no error.

    Raises one of `engine_errors` if it cannot be removed, and `InfraError` if that takes over a
    minute.
    """
    from docker.errors import APIError, NotFound

    try:
        engine.client.api.remove_container(container, v=True, force=True)
    except APIError as error:
        in_progress = error.status_code == 409 and "is already in progress" in str(
            error.explanation
        )
        if not (in_progress or isinstance(error, NotFound)):
            raise
    deadline = time.monotonic() + _REMOVAL_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            engine.client.api.inspect_container(container)
        except NotFound:
            return
        time.sleep(0.05)
    raise InfraError(
        f"the Docker Engine did not remove container {container[:12]} in {_REMOVAL_TIMEOUT_S:.0f} s"
    )


def close(stream: Any) -> None:
    """Close a stream of the Docker SDK, such as a log. May be called again, and with None."""
    # The SDK raises AttributeError if the other side closed it first.
    with contextlib.suppress(AttributeError, OSError, *engine_errors()):
        stream.close()
    # The SDK wakes the reader but keeps the descriptor, which only the response frees.
    response = getattr(stream, "_response", None)
    if response is not None:
        response.close()
