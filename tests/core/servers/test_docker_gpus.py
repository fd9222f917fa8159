"""GPU requests to a real engine without a GPU.

A stub of NVIDIA's hook accepts or refuses them (fixtures/gpu_stubs).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Harness, StubGpus
from tests.core.servers.docker_helpers import containers_of, running
from tests.skipping import cannot_run
from vllm_repro.command.container import ContainerSpec
from vllm_repro.errors import InfraError, ReproError, Unsupported
from vllm_repro.host.gpu_lease import leased_gpus
from vllm_repro.journal.journal import read
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers.docker import DockerServer
from vllm_repro.servers.docker_engine import Engine, gpu_prefix
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.site import choose

pytestmark = [pytest.mark.docker, pytest.mark.anyio]

TQ = find("tq-chunked-prefill")
CALLS = Path("/tmp/vllm-repro-gpu-stub")
"""Where the stub of the hook writes what it was asked for."""
STUB_IMAGE = "vllm-repro/stub-of-a-gpu-image:latest"


@pytest.fixture
def engine(docker_engine: Engine, base_image: str) -> Iterator[Engine]:
    """Return an engine with the stub of the hook. No container of a request may be left."""
    try:
        assert gpu_prefix(docker_engine, base_image) == ""
    except Unsupported:
        cannot_run(
            "the engine has no NVIDIA hook: DOCKERD_PATH=$PWD/fixtures/gpu_stubs .ci/dockerd.sh"
            " start"
        )
    yield docker_engine
    assert containers_of(docker_engine, "gpu-request") == []


def asked(container: str) -> str:
    """Return the cards that the engine asked the hook for."""
    request = (CALLS / f"{container}.json").read_text(encoding="utf-8")
    return str(json.loads(request)["NVIDIA_VISIBLE_DEVICES"])


@pytest.mark.parametrize(
    ("gpus", "cards"),
    [("all", "all"), ("1", "0"), ("2", "0,1"), ("device=3", "3"), ("device=1,3", "1,3")],
)
async def test_what_the_engine_makes_of_a_request(
    engine: Engine,
    program: Callable[..., ContainerSpec],
    serve: Callable[..., DockerServer],
    gpus: str,
    cards: str,
) -> None:
    assert engine.local
    server = serve(program("import time; time.sleep(60)", gpus=gpus), grace=0.0)
    async with running(server) as facts:
        assert asked(f"{facts.container_id}") == cards


@pytest.mark.parametrize(
    ("gpus", "env", "error", "words", "hint"),
    [
        ("device=7", {}, InfraError, "unknown device", "nvidia-smi -L"),
        (
            "all",
            {"NVIDIA_REQUIRE_CUDA": "cuda>=99.0"},
            Unsupported,
            "unsatisfied condition: cuda>=99.0",
            "older than",
        ),
        (
            "all",
            {"STUB_REFUSAL": "nvml error: driver not loaded"},
            InfraError,
            "driver not loaded",
            "Reload it",
        ),
    ],
)
async def test_a_refusal_quotes_the_hook_and_has_its_own_hint(
    engine: Engine,
    program: Callable[..., ContainerSpec],
    serve: Callable[..., DockerServer],
    gpus: str,
    env: dict[str, str],
    error: type[ReproError],
    words: str,
    hint: str,
) -> None:
    assert engine.local
    server = serve(program("pass", gpus=gpus, env=tuple(env.items())))
    with pytest.raises(error, match=words) as caught:
        await server.start()
    assert "nvidia-container-cli" in str(caught.value)
    assert hint in caught.value.hint


@pytest.fixture
def stub_image(engine: Engine, rehearsal_image: str) -> Iterator[str]:
    """Return the rehearsal image without its label.

    It passes for an image of vLLM until its server answers.
    """
    text = f'FROM {rehearsal_image}\nLABEL org.vllm-repro.rehearsal=""\n'
    engine.client.images.build(
        fileobj=io.BytesIO(text.encode()), tag=STUB_IMAGE, rm=True, forcerm=True
    )
    yield STUB_IMAGE
    engine.client.images.remove(STUB_IMAGE)


def test_a_run_gets_its_leased_cards_and_is_no_evidence(
    harness: Harness, stub_gpus: StubGpus, stub_image: str
) -> None:
    run = (
        "run",
        "tq-chunked-prefill",
        "--server",
        "docker",
        "--image",
        stub_image,
        "--arm",
        "reported",
    )
    with leased_gpus(2, lambda _: ""):
        done = harness(*run, "--weights", "dummy")
    started = [event["facts"] for event in read(done.run / "journal.jsonl").of("server-started")]
    assert started
    for facts in started:
        assert facts["argv"][facts["argv"].index("--gpus") + 1] == "device=2"
        assert asked(facts["container_id"]) == "2"
    assert (done.trial["outcome"], done.status) == ("infra", 2)
    assert "this server is the rehearsal engine, not vLLM" in done.trial["why"]

    stub_gpus.say(cards=[{"memory.used": 4}])
    assert (
        harness(*run, "--weights", "dummy").report["arms"][0]["command"].count("--gpus device=0")
        == 1
    )


def test_auto_takes_an_engine_whose_hook_accepts_a_request(
    stub_gpus: StubGpus, stub_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_repro.servers.docker_site.default_image", lambda *_: stub_image)
    choice = choose(TQ, ServerOptions(weights="dummy"))
    assert choice.kind is ServerKind.DOCKER, choice.why
    stub_gpus.say(fail="no driver")
    choice = choose(TQ, ServerOptions(weights="dummy"), download=False)
    assert choice.kind is not ServerKind.DOCKER
    assert "this machine has no NVIDIA GPU: nvidia-smi fails: no driver" in choice.why
