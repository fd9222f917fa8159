"""Whole runs in containers on a real engine, also interrupted ones."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker.types import DeviceRequest

from tests.commands import interrupted, started, until
from tests.conftest import Harness
from tests.core.servers.conftest import build
from tests.core.servers.docker_helpers import containers_of
from tests.golden_files import missing
from vllm_repro.command.parse import parse
from vllm_repro.host.ports import free_port
from vllm_repro.scenario.catalogue import scenario_ids
from vllm_repro.servers.docker_engine import Engine

pytestmark = pytest.mark.docker


@pytest.fixture
def engine(docker_engine: Engine, tmp_path: Path) -> Iterator[Engine]:
    """Return the engine; afterwards no container of this test may be left."""
    yield docker_engine
    left = [
        c
        for path in (tmp_path / "reports").glob("*/2*")
        for c in containers_of(docker_engine, path.name)
    ]
    for container in left:
        docker_engine.client.api.remove_container(container["Id"], force=True)
    assert left == [], "the run left a container behind"


@pytest.mark.parametrize("version", ["0.23.0", "0.24.0"])
def test_the_chunked_prefill_in_containers(
    harness: Harness, engine: Engine, rehearsal_image: str, version: str
) -> None:
    words = f"--server docker --image {rehearsal_image} --vllm {version}"
    arms = ("--arm", "reported", "--arm", "near-miss-128")
    done = harness("run", "tq-chunked-prefill", *words.split(), *arms)
    assert done.status == 0, done.out + done.err
    assert done.report["evidence"] == "rehearsal"
    assert done.report["environment"]["docker"]
    server = done.report["arms"][0]["server"]
    assert (server["image"], server["vllm_version"]) == (rehearsal_image, version)
    assert re.search("(^|@)sha256:", server["digest"])
    crashes = version == "0.23.0"
    outcomes = {"reported": ["crash" if crashes else "clean"], "near-miss-128": ["untriggered"]}
    assert done.outcomes == outcomes
    assert not crashes or "container" in done.trial["death"]["channels"]
    command = parse(done.report["arms"][0]["command"])
    assert command.get("--kv-cache-dtype") == "turboquant_4bit_nc"
    assert containers_of(engine, done.run.name) == []


def test_two_nodes_in_two_containers(
    harness: Harness, engine: Engine, rehearsal_image: str
) -> None:
    branch = "0.20.1rc1.dev12+g363ffa145"
    arms = ("--arm", "reported", "--arm", "eager")
    done = harness(
        "run", "dsv4-tp2", "--server", "docker", "--image", rehearsal_image, "--vllm", branch, *arms
    )
    assert done.status == 0, done.out + done.err
    assert done.outcomes == {"reported": ["crash"], "eager": ["clean"]}
    assert done.trial["death"]["ranks"] == [0, 1]
    assert "21.80 MB, current size is 21.62 MB" in done.trial["death"]["message"]
    logs = {path.name for path in (done.run / "logs").glob("reported*")}
    assert logs == {"reported-1.log", "reported-1.rank1.log"}
    assert containers_of(engine, done.run.name) == []


def test_a_foreign_container_is_attached_with_its_log(
    harness: Harness, engine: Engine, rehearsal_image: str
) -> None:
    port = free_port()
    container = engine.client.containers.run(
        rehearsal_image,
        ["some-model", "--host", "0.0.0.0", "--port", "8000"],
        environment={"VLLM_REHEARSAL_VERSION": "0.28.0"},
        ports={"8000/tcp": ("127.0.0.1", port)},
        detach=True,
    )
    try:
        while b"Application startup complete" not in container.logs():
            time.sleep(0.05)
        done = harness(
            "run", "min-tokens-stop-ids", "--url", f"http://127.0.0.1:{port}", "--arm", "near-miss"
        )
        log = (done.run / "logs" / "near-miss-1.log").read_text(encoding="utf-8")
        assert "Application startup complete" in log
    finally:
        container.remove(force=True)


def test_what_show_prints_is_what_was_run(
    harness: Harness, engine: Engine, rehearsal_image: str
) -> None:
    assert engine.local
    choice = f"tq-chunked-prefill --arm eager --image {rehearsal_image} --vllm 0.24.0".split()
    shown = harness("show", *choice, "--as", "docker").out.strip()
    done = harness("run", *choice, "--server", "docker")
    assert done.status == 0, done.out + done.err
    ran, shown = (
        re.sub(r"127\.0\.0\.1:\d+:", "", text)
        for text in (done.report["arms"][0]["command"], shown)
    )
    assert ran == shown


def test_an_engine_without_a_driver_for_gpus_is_unsupported(
    harness: Harness, engine: Engine, base_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.local
    # One that no engine has: this one may have the stub of NVIDIA's hook.
    monkeypatch.setattr(
        "vllm_repro.servers.docker.device_request",
        lambda _: DeviceRequest(driver="none", count=1, capabilities=[["gpu"]]),
    )
    done = harness("run", "tq-chunked-prefill", "--server", "docker", "--image", base_image)
    assert (done.status, done.trial["outcome"]) == (2, "unsupported")
    assert (
        missing(done.trial["why"], "could not select device driver", "NVIDIA Container Toolkit")
        == []
    )
    assert not any(arm["trials"] for arm in done.report["arms"][1:]), "one refusal is enough"


def interrupt(tmp_path: Path, image: str, number: signal.Signals, moment: str) -> tuple[int, Path]:
    """Start a long run in a container and signal it when its journal contains `moment`."""
    out = tmp_path / "reports"
    run = f"run min-tokens-stop-ids --server docker --image {image} --arm near-miss --trials 50"
    return interrupted(started(out, *run.split()), number, moment, out)


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        (signal.SIGINT, "trial-started"),
        (signal.SIGTERM, "server-started"),
        (signal.SIGTERM, '"ready"'),
    ],
)
def test_an_interrupted_run_leaves_no_container(
    tmp_path: Path, engine: Engine, rehearsal_image: str, number: signal.Signals, moment: str
) -> None:
    status, folder = interrupt(tmp_path, rehearsal_image, number, moment)
    assert (status, containers_of(engine, folder.name)) == (130, [])
    assert (
        json.loads((folder / "report.json").read_text(encoding="utf-8"))["interrupted"]
        == number.name
    )


@pytest.mark.parametrize("moment", ["trial-started", '"ready"'])
def test_after_a_sigkill_the_container_goes_too(
    tmp_path: Path, engine: Engine, rehearsal_image: str, moment: str
) -> None:
    status, folder = interrupt(tmp_path, rehearsal_image, signal.SIGKILL, moment)
    assert status == -signal.SIGKILL
    time.sleep(3)  # the engine may still be creating what it was asked for
    until(lambda: not containers_of(engine, folder.name), seconds=15)
    assert containers_of(engine, folder.name) == []


def test_the_image_lists_scenarios_and_reaches_the_engine(
    docker_engine: Engine,
) -> None:
    image = build("harness")
    run = ["docker", "run", "--rm", "--network", "none"]
    listed = subprocess.run(
        [*run, image, "list", "--json"], check=True, capture_output=True, text=True, timeout=120
    )
    assert {row["scenario"] for row in json.loads(listed.stdout)} == set(scenario_ids())
    socket = docker_engine.host.removeprefix("unix://")
    assert socket.startswith("/"), docker_engine.host
    words = [*run, "--volume", f"{socket}:/var/run/docker.sock", image, "doctor", "--json"]
    found = json.loads(
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=120).stdout
    )
    checks = {check["what"]: check for check in found}
    assert checks["docker"]["ok"], checks["docker"]
    assert checks["C++ compiler"]["ok"]
