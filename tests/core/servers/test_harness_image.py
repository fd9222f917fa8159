"""The container image of the harness itself, on a real Docker Engine."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.core.servers.conftest import build
from vllm_repro.scenario.catalogue import scenario_ids
from vllm_repro.servers.docker_engine import Engine

pytestmark = pytest.mark.docker


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
