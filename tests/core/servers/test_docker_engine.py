from __future__ import annotations

from pathlib import Path
from typing import Any

import docker.errors
import pytest
import requests
import requests.exceptions

from tests.core.servers.docker_helpers import engine_or_reason
from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.servers.base import Exit
from vllm_repro.servers.docker import exit_of
from vllm_repro.servers.docker_engine import (
    Engine,
    connect,
    explain,
    image_facts,
    missing_image,
    repository_digest,
)


@pytest.mark.parametrize(
    ("host", "why", "hint"),
    [
        ("unix:///nowhere/none.sock", ": No such file or directory", "Start Docker."),
        ("nonsense", "", ""),
        ("tcp://127.0.0.1:1", "", ""),
        ("tcp://127.0.0.1:no-port", "", ""),
    ],
)
def test_no_engine_at_the_host_that_was_named(host: str, why: str, hint: str) -> None:
    with pytest.raises(InfraError, match=f"^no Docker Engine answers at {host}{why}") as caught:
        connect({"DOCKER_HOST": host})
    assert hint in caught.value.hint


def test_ci_fails_where_others_skip(tmp_path: Path) -> None:
    environment = {"DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    with pytest.raises(pytest.skip.Exception, match="Start one with"):
        engine_or_reason(environment)
    with pytest.raises(
        pytest.fail.Exception, match="CI promises what this test needs: no Docker Engine"
    ):
        engine_or_reason({**environment, "CI": "true"})


@pytest.mark.docker
def test_an_engine_reports_its_version(docker_engine: Engine) -> None:
    assert int(docker_engine.version.split(".")[0]) >= 20
    assert docker_engine.local


@pytest.mark.docker
def test_what_an_image_is(docker_engine: Engine, rehearsal_image: str, base_image: str) -> None:
    rehearsal = image_facts(docker_engine, rehearsal_image)
    assert rehearsal.rehearsal
    assert rehearsal.digest.startswith("sha256:"), (
        "an image that was never pushed is known by its id"
    )
    assert not image_facts(docker_engine, base_image).rehearsal
    with pytest.raises(InfraError, match="is not on this machine"):
        image_facts(docker_engine, "vllm-repro/nowhere:v0.0.1")


@pytest.mark.parametrize(
    ("image", "hint"),
    [
        ("vllm/vllm-openai:v0.20.2", "docker pull vllm/vllm-openai:v0.20.2"),
        (
            "vllm-repro/rehearsal:latest",
            "Build it in a checkout: fixtures/images/build.sh rehearsal",
        ),
        (
            "vllm-repro/vllm-cpu:0.28.0",
            "Build it in a checkout: fixtures/images/build.sh vllm-cpu 0.28.0",
        ),
    ],
)
def test_how_to_get_an_image(image: str, hint: str) -> None:
    assert missing_image(image).hint == hint


@pytest.mark.parametrize(
    ("image", "known", "expected"),
    [
        (
            "vllm/vllm-openai:v1",
            ["other@sha256:aa", "vllm/vllm-openai@sha256:bb"],
            "vllm/vllm-openai@sha256:bb",
        ),
        ("127.0.0.1:5000/x:v1", ["127.0.0.1:5000/x@sha256:cc"], "127.0.0.1:5000/x@sha256:cc"),
        ("renamed:v1", ["vllm/vllm-openai@sha256:bb"], "vllm/vllm-openai@sha256:bb"),
        ("x@sha256:dd", ["y@sha256:ee", "x@sha256:dd"], "x@sha256:dd"),
        ("built-here:v1", [], None),
    ],
)
def test_the_digest_of_an_image(image: str, known: list[str], expected: str | None) -> None:
    assert repository_digest(image, known) == expected


SHIM = (
    "failed to create shim task: OCI runtime create failed: runc create failed: unable to start"
    " container process: "
)
HOOK = (
    SHIM + "error running hook #0: error running hook: exit status 1, stdout: , stderr:"
    " nvidia-container-cli: "
)


def refusal(words: str) -> docker.errors.APIError:
    response = requests.Response()
    response.status_code = 500
    return docker.errors.APIError("refused", response=response, explanation=words)


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        ('could not select device driver "" with capabilities: [[gpu]]', Unsupported, "Toolkit"),
        ("Unknown runtime specified nvidia", Unsupported, "Toolkit"),
        ("unknown or invalid runtime name: nvidia", Unsupported, "Toolkit"),
        (
            HOOK + "requirement error: unsatisfied condition: cuda>=13.0, please update",
            Unsupported,
            "older than the image",
        ),
        (
            HOOK + "initialization error: nvml error: driver not loaded: unknown",
            InfraError,
            "driver does not work",
        ),
        (
            HOOK + "initialization error: load library failed: libnvidia-ml.so.1: x",
            InfraError,
            "driver does not work",
        ),
        (HOOK + "device error: 7: unknown device: unknown", InfraError, "nvidia-smi -L"),
        (
            "CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=7",
            InfraError,
            "nvidia-ctk cdi generate",
        ),
        (HOOK + "something new", Unsupported, "Toolkit"),
        (
            SHIM + "error setting rlimit type 8: operation not permitted: unknown",
            Unsupported,
            "runs as root",
        ),
        ("Bind for 127.0.0.1:8000 failed: port is already allocated", InfraError, "another"),
        ("something\n  new", InfraError, ""),
    ],
)
def test_a_refusal_quotes_the_engine(
    words: str, error: type[InfraError] | type[Unsupported], hint: str
) -> None:
    explained = explain(refusal(words))
    assert type(explained) is error
    assert str(explained) == f"the Docker Engine refuses: {' '.join(words.split())}"
    silent = explain(requests.exceptions.ConnectionError(words))
    assert type(silent) is InfraError
    assert f"{silent}".startswith("the Docker Engine does not answer: ")
    assert hint in explained.hint
    assert bool(hint) is bool(explained.hint)


@pytest.mark.parametrize(
    ("state", "code", "detail", "oom_killed", "lost"),
    [
        ({"ExitCode": 0, "OOMKilled": False, "Error": ""}, 0, "container exited 0", False, False),
        ({"ExitCode": 3, "OOMKilled": True}, 3, "container exited 3, OOM killed", True, False),
        (
            {"ExitCode": 128, "Error": "no\nluck"},
            128,
            "container exited 128: no luck",
            False,
            False,
        ),
        ({}, None, "the container was removed by somebody else", False, False),
        (
            None,
            None,
            "the Docker Engine does not answer, so nothing is known about the container",
            False,
            True,
        ),
    ],
)
def test_how_a_server_ended(
    state: dict[str, Any] | None, code: int | None, detail: str, oom_killed: bool, lost: bool
) -> None:
    ended = exit_of(state, 12.5)
    assert ended == Exit(code=code, detail=detail, at=12.5, oom_killed=oom_killed, lost=lost)
