"""Refusals as engines really word them, and what is made of them."""

from __future__ import annotations

import docker.errors
import pytest
import requests
import requests.exceptions
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.servers.docker_errors import engine_lost, explain, is_gone

IMAGE = "vllm/vllm-openai:v0.20.2"

SHIM = "failed to create shim task: OCI runtime create failed: runc create failed: unable to start container process: "


def refusal(status: int, words: str) -> docker.errors.APIError:
    response = requests.Response()
    response.status_code = status
    kind = docker.errors.NotFound if status == 404 else docker.errors.APIError
    return kind("refused", response=response, explanation=words)


@pytest.mark.parametrize(
    ("words", "error", "sentence", "hint"),
    [
        (
            'could not select device driver "" with capabilities: [[gpu]]',
            Unsupported,
            "the Docker Engine cannot give a container a GPU",
            "NVIDIA Container Toolkit",
        ),
        (
            'could not select device driver "nvidia" with capabilities: [[gpu]]',
            Unsupported,
            "the Docker Engine cannot give a container a GPU",
            "NVIDIA Container Toolkit",
        ),
        (
            "Unknown runtime specified nvidia",
            Unsupported,
            "the Docker Engine does not have that runtime",
            "NVIDIA Container Toolkit",
        ),
        (
            "unknown or invalid runtime name: nvidia",
            Unsupported,
            "the Docker Engine does not have that runtime",
            "NVIDIA Container Toolkit",
        ),
        (
            'error gathering device information while adding custom device "/dev/nvidia0": no such file or directory',
            Unsupported,
            "the host lacks a device that the container asks for",
            "nvidia-smi",
        ),
        (
            SHIM + "error during container init: error running hook #0: error running hook: exit status 1, stdout: , "
            "stderr: nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.9: unknown",
            Unsupported,
            "the NVIDIA runtime could not prepare the container",
            "driver",
        ),
        (
            SHIM + "error during container init: error setting rlimit type 8: operation not permitted: unknown",
            Unsupported,
            "the Docker Engine may not grant a limit or capability that the container asks for",
            "engine that runs as root",
        ),
        (
            SHIM + "unable to apply caps: operation not permitted: unknown",
            Unsupported,
            "the Docker Engine may not grant a limit or capability that the container asks for",
            "engine that runs as root",
        ),
        (f"No such image: {IMAGE}", InfraError, f"the image {IMAGE} is not on this machine", f"docker pull {IMAGE}"),
        (
            (
                "driver failed programming external connectivity on endpoint n: Bind for 127.0.0.1:8000 failed: "
                "port is already allocated"
            ),
            InfraError,
            "the port on this host is taken",
            "--port",
        ),
        (
            (
                "driver failed programming external connectivity on endpoint n: Error starting userland proxy: "
                "listen tcp4 127.0.0.1:8000: bind: address already in use"
            ),
            InfraError,
            "the port on this host is taken",
            "--port",
        ),
        (
            'Conflict. The container name "/vllm" is already in use by container "abc". You have to remove it.',
            InfraError,
            "a container of that name is there already",
            "vllm-repro clean",
        ),
        (
            'invalid mount config for type "bind": bind source path does not exist: /models/x',
            InfraError,
            "/models/x, which was to be mounted, is not on the engine's host",
            "other folders",
        ),
        (
            SHIM + 'exec: "/nope": stat /nope: no such file or directory: unknown',
            InfraError,
            f"/nope, which was to be started, cannot be run in the image {IMAGE}",
            "entrypoint",
        ),
        (
            SHIM + 'exec: "vllm": executable file not found in $PATH: unknown',
            InfraError,
            f"vllm, which was to be started, cannot be run in the image {IMAGE}",
            "entrypoint",
        ),
        (
            "Requested CPUs are not available - requested 0-63, available: 0-1",
            InfraError,
            "the container is bound to CPUs that this host does not have",
            "",
        ),
        ("network run-1 not found", InfraError, "the network run-1 does not exist", ""),
        (
            "mkdir /var/lib/docker/overlay2/x: no space left on device",
            InfraError,
            "the disk of the Docker Engine is full",
            "docker system df",
        ),
    ],
)
def test_a_known_refusal(words: str, error: type[InfraError] | type[Unsupported], sentence: str, hint: str) -> None:
    explained = explain(refusal(500, words), IMAGE)
    assert type(explained) is error
    assert str(explained) == f"{sentence}: {words}", "the engine's own words are kept"
    assert hint in explained.hint
    assert "{" not in explained.hint


def test_an_unknown_refusal_is_trouble_of_the_host() -> None:
    explained = explain(refusal(500, "something\n  new"), IMAGE)
    assert isinstance(explained, InfraError)
    assert str(explained) == "the Docker Engine refuses: something new"


@given(st.text(max_size=200))
def test_any_words_are_explained(words: str) -> None:
    explained = explain(refusal(500, words), IMAGE)
    assert isinstance(explained, InfraError | Unsupported)
    assert " ".join(words.split()) in str(explained) or not words.strip()


def test_an_engine_that_does_not_answer() -> None:
    error = requests.exceptions.ConnectionError("Connection aborted.")
    assert engine_lost(error)
    assert not engine_lost(refusal(404, "No such container: x"))
    explained = explain(error, IMAGE)
    assert isinstance(explained, InfraError)
    assert str(explained) == "the Docker Engine does not answer: Connection aborted."


@pytest.mark.parametrize(
    ("status", "words", "gone"),
    [
        (404, "No such container: abc", True),
        (409, "removal of container abc is already in progress", True),
        (409, "You cannot remove a running container abc", False),
        (500, "driver failed to remove root filesystem", False),
    ],
)
def test_what_a_failed_removal_means(status: int, words: str, gone: bool) -> None:
    assert is_gone(refusal(status, words)) is gone


def test_a_lost_engine_is_not_a_removal() -> None:
    assert not is_gone(requests.exceptions.ConnectionError("refused"))
