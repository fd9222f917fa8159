"""One real vLLM over two nodes, as two containers on this CPU.

A container's processes end with its first one, so a killed `vllm serve` leaves no worker behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.live import two_ranks
from tests.live.two_ranks import Run
from tests.servers.conftest import build
from tests.servers.docker_helpers import containers_of
from vllm_repro.servers.docker_engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.live, pytest.mark.by_hand]

RELEASE = "0.32.0"


@pytest.fixture
def begin(tmp_path: Path, docker_engine: Engine) -> Iterator[Callable[..., Run]]:
    image = build("vllm-cpu", RELEASE)
    started: list[Run] = []

    def start(*options: str) -> Run:
        started.append(two_ranks.begin(tmp_path, "--server", "docker", "--image", image, "--vllm", RELEASE, *options))
        assert len(containers_of(docker_engine, started[-1].folder.name)) == 2
        return started[-1]

    yield start
    for run in started:
        run.end()
        assert containers_of(docker_engine, run.folder.name) == []


def test_a_killed_worker_of_the_second_container_is_a_death_that_names_its_rank(begin: Callable[..., Run]) -> None:
    run = begin()
    run.worker().kill()
    trial = run.report()["arms"][0]["trials"][0]
    assert trial["outcome"] == "other-crash"
    assert trial["death"]["ranks"] == [1]
    assert "rank" in trial["death"]["channels"]
    text = (run.folder / "report.md").read_text(encoding="utf-8")
    assert "Began on rank 1: logs/reported-1.rank1.log" in text


def test_the_second_launcher_killed_takes_its_container_and_the_engine_with_it(begin: Callable[..., Run]) -> None:
    run = begin()
    worker = run.worker()
    (launcher,) = run.second_node().children()
    launcher.kill()
    trial = run.report()["arms"][0]["trials"][0]
    assert trial["outcome"] == "other-crash", trial["why"]
    assert any(entry["event"] == "rank-exited" and entry["rank"] == 1 for entry in run.journal())
    assert not worker.is_running()
