"""What the Docker Engine says when it refuses, and which error of this package that is. Pure.

A refusal keeps the engine's own words; a sentence before them says what they mean and the hint what to do.
One that is not known here is trouble of the host, never of vLLM.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import docker.errors
import requests.exceptions

from vllm_repro.errors import InfraError, ReproError, Unsupported

__all__ = ["ENGINE_ERRORS", "engine_lost", "explain", "is_gone"]

ENGINE_ERRORS = (docker.errors.DockerException, requests.exceptions.RequestException)
"""Everything that a call of the Docker SDK may raise about the engine."""

_TOOLKIT = (
    "Install the NVIDIA Container Toolkit and restart Docker; "
    "`docker run --rm --gpus all --entrypoint nvidia-smi IMAGE` tests it."
)
_ROOTLESS = "Use an engine that runs as root with all capabilities, or an arm whose command does not ask for it."


@dataclass(frozen=True)
class _Refusal:
    """`sentence` and `hint` may use `{image}` and the pattern's own groups."""

    pattern: str
    error: type[InfraError] | type[Unsupported]
    sentence: str
    hint: str = ""


_REFUSALS = (
    _Refusal(
        r"could not select device driver",
        Unsupported,
        "the Docker Engine cannot give a container a GPU",
        _TOOLKIT,
    ),
    _Refusal(
        r"Unknown runtime specified (?P<runtime>\S+)|unknown or invalid runtime name: (?P<name>\S+)",
        Unsupported,
        "the Docker Engine does not have that runtime",
        _TOOLKIT,
    ),
    _Refusal(
        r"error gathering device information while adding custom device|unresolvable CDI devices",
        Unsupported,
        "the host lacks a device that the container asks for",
        "`nvidia-smi` on the host shows which GPUs there are.",
    ),
    _Refusal(
        r"nvidia-container-cli|error running (?:prestart |createRuntime )?hook",
        Unsupported,
        "the NVIDIA runtime could not prepare the container",
        "Often the driver is older than the image's CUDA; `nvidia-smi` on the host shows both.",
    ),
    _Refusal(
        r"error setting rlimit|unable to apply caps|can't get final child's PID from pipe",
        Unsupported,
        "the Docker Engine may not grant a limit or capability that the container asks for",
        _ROOTLESS,
    ),
    _Refusal(
        r"No such image|manifest unknown|pull access denied|repository does not exist",
        InfraError,
        "the image {image} is not on this machine",
        "docker pull {image}",
    ),
    _Refusal(
        r"port is already allocated|address already in use|Ports are not available",
        InfraError,
        "the port on this host is taken",
        "Name another with --port, or leave it out and a free one is taken.",
    ),
    _Refusal(
        r"container name \"?(?P<taken>[^\"\s]+)\"? is already in use",
        InfraError,
        "a container of that name is there already",
        "`vllm-repro clean` lists what earlier runs left; others are yours to remove.",
    ),
    _Refusal(
        r"bind source path does not exist: (?P<path>.+)",
        InfraError,
        "{path}, which was to be mounted, is not on the engine's host",
        "An engine on another machine, or in a virtual machine, sees other folders than this process.",
    ),
    _Refusal(
        r"exec: \"?(?P<program>[^\":]+)\"?: .*(?:no such file|executable file not found|permission denied)",
        InfraError,
        "{program}, which was to be started, cannot be run in the image {image}",
        "Is it a vLLM image? `docker image inspect {image}` shows its entrypoint.",
    ),
    _Refusal(
        r"Requested CPUs are not available",
        InfraError,
        "the container is bound to CPUs that this host does not have",
    ),
    _Refusal(
        r"network (?P<network>\S+) not found",
        InfraError,
        "the network {network} does not exist",
    ),
    _Refusal(
        r"no space left on device",
        InfraError,
        "the disk of the Docker Engine is full",
        "`docker system df` shows what fills it.",
    ),
    _Refusal(
        r"permission denied while trying to connect|PermissionError|Permission denied",
        InfraError,
        "this user may not use the Docker Engine",
        "Join the group docker (and log in again), or set DOCKER_HOST to an engine of yours.",
    ),
)


def explain(error: Exception, image: str) -> ReproError:
    """What `error`, raised by the Docker SDK about a container of `image`, is in this package."""
    words = _words(error)
    for refusal in _REFUSALS:
        match = re.search(refusal.pattern, words, re.IGNORECASE)
        if match is not None:
            found = {key: value for key, value in match.groupdict().items() if value}
            names = {"image": image, **found}
            return refusal.error(f"{refusal.sentence.format(**names)}: {words}", hint=refusal.hint.format(**names))
    if engine_lost(error):
        return InfraError(f"the Docker Engine does not answer: {words}", hint="Is it running? `docker info` asks it.")
    return InfraError(f"the Docker Engine refuses: {words}")


def engine_lost(error: Exception) -> bool:
    """Whether `error` says that no engine answers, as against an answer that refuses."""
    return not isinstance(error, docker.errors.APIError)


def is_gone(error: Exception) -> bool:
    """Whether a failed removal means that the thing is gone, or going: nothing is left to do."""
    if isinstance(error, docker.errors.NotFound):
        return True
    return (
        isinstance(error, docker.errors.APIError)
        and error.status_code == 409
        and "is already in progress" in str(error.explanation)
    )


def _words(error: Exception) -> str:
    """The engine's own message on one line, without the SDK's address and status."""
    text = error.explanation if isinstance(error, docker.errors.APIError) and error.explanation else str(error)
    return " ".join(str(text).split())
