"""One real vLLM over two nodes, as two processes on this CPU: which rank died.

Signals go by pid to processes that the test's own run started.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.live import two_ranks
from tests.live.two_ranks import Run
from tests.skipping import cannot_run
from vllm_repro.host.processes import session_members
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source

pytestmark = pytest.mark.live

RELEASE = "0.32.0"


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    # before the run, so that its time limit does not include the install
    provision(Source(release=RELEASE))
    started: list[Run] = []

    def start(*options: str, within: Sequence[str] = ()) -> Run:
        started.append(
            two_ranks.begin(
                tmp_path,
                "--server",
                "process",
                "--no-throughput",
                "--vllm",
                RELEASE,
                *options,
                within=within,
            )
        )
        return started[-1]

    yield start
    for run in started:
        facts = run.facts()
        run.end()
        sessions = [int(facts["pid"]), int(facts["ranks"][0]["pid"])]
        assert [session_members(session) for session in sessions] == [[], []]


def test_a_killed_worker_of_node_2_is_a_crash_with_its_rank(
    begin: Callable[..., Run],
) -> None:
    run = begin()
    run.worker().kill()
    trial = run.report()["arms"][0]["trials"][0]
    assert trial["outcome"] == "other-crash"
    assert trial["death"]["ranks"] == [1]
    # /health is a sign only if the API server lives for a second without its engine.
    assert {"rank", "process"} <= set(trial["death"]["channels"])
    text = (run.folder / "report.md").read_text(encoding="utf-8")
    assert "Began on rank 1: logs/reported-1.rank1.log" in text


def test_a_stopped_worker_of_the_second_node_is_a_hang(begin: Callable[..., Run]) -> None:
    run = begin("--answer-stall", "15")
    run.worker().send_signal(signal.SIGSTOP)
    trial = run.report()["arms"][0]["trials"][0]
    assert trial["outcome"] == "hang", trial["why"]
    assert "/health answers 200" in trial["why"]


@pytest.mark.by_hand
def test_a_cut_link_between_the_nodes_is_a_hang(begin: Callable[..., Run]) -> None:
    """The run has a network of its own, in which all packets but those of HTTP are dropped."""
    if os.geteuid() != 0:
        cannot_run("a network namespace needs root")
    run = begin(
        "--answer-stall",
        "15",
        within=("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"),
    )
    argv = run.facts()["argv"]
    port = argv[argv.index("--port") + 1]
    drop = f"iptables -A INPUT -p tcp -m multiport ! --ports {port} -j DROP"
    subprocess.run(["nsenter", f"--target={run.process.pid}", "--net", *drop.split()], check=True)
    trial = run.report()["arms"][0]["trials"][0]
    assert trial["outcome"] == "hang", trial["why"]
    assert "/health answers 200" in trial["why"]


@pytest.mark.by_hand
# beside another engine two ranks make about ten tokens a second, and this test needs 3,500
@pytest.mark.alone
def test_a_killed_second_launcher_is_no_crash(
    begin: Callable[..., Run],
) -> None:
    run = begin()
    orphan = run.worker()
    run.second_node().kill()
    report = run.report()
    trial = report["arms"][0]["trials"][0]
    assert trial["outcome"] == "clean", trial["why"]
    assert trial["death"] is None
    assert trial["requests"] == {"sent": 1, "ok": 1, "failed": 0}
    assert any(entry["event"] == "rank-exited" and entry["rank"] == 1 for entry in run.journal())
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
