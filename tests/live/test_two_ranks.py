"""One real vLLM over two nodes, as two processes on this CPU: whose death is whose, and that nothing is left of either.

Signals go to processes that the test's own run started, by pid, found in that run's journal and among their children.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm_repro.processes import session_members
from vllm_repro.releases.provision import provision

pytestmark = pytest.mark.live

SCENARIO = Path(__file__).parents[1] / "data" / "declared" / "two_ranks.py"
RELEASE = "0.32.0"


@dataclass
class Run:
    """A run of the harness in the background, whose long request is in flight."""

    process: subprocess.Popen[bytes]
    folder: Path

    def journal(self) -> list[dict[str, Any]]:
        text = (self.folder / "journal.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = next(entry for entry in self.journal() if entry["event"] == "server-started")["facts"]
        return facts

    def second_node(self) -> int:
        return int(self.facts()["ranks"][0]["pid"])

    def worker(self) -> psutil.Process:
        """The worker of rank 1, a child of the second node."""
        children = psutil.Process(self.second_node()).children(recursive=True)
        return next(child for child in children if "Worker_TP1" in " ".join(child.cmdline()))

    def sessions(self) -> list[int]:
        return [int(self.facts()["pid"]), self.second_node()]

    def report(self) -> dict[str, Any]:
        self.process.wait(timeout=280)
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text(encoding="utf-8"))
        return report


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    provision(RELEASE)  # here, so that an install does not count against the time of a run
    started: list[Run] = []

    def start(*options: str) -> Run:
        command = [sys.executable, "-m", "vllm_repro", "run", str(SCENARIO), "--server", "process", "--vllm", RELEASE]
        process = subprocess.Popen(
            [*command, "--out", str(tmp_path), *options],
            env={**os.environ, "CI": "true"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        while not (folders := list((tmp_path / "two-ranks").glob("2*/journal.jsonl"))):
            assert process.poll() is None
            time.sleep(0.1)
        run = Run(process, folders[0].parent)
        started.append(run)
        size, grown = 0, time.monotonic()
        while not any(entry["event"] == "request-sent" for entry in run.journal()):
            assert process.poll() is None, "the run ended before its request was sent"
            now = sum(log.stat().st_size for log in (run.folder / "logs").iterdir())
            if now != size:
                size, grown = now, time.monotonic()
            assert time.monotonic() - grown < 240, "the boot makes no progress"
            time.sleep(0.2)
        return run

    yield start
    for run in started:
        if run.process.poll() is None:
            run.process.terminate()
            run.process.wait(timeout=120)
        assert [session_members(session) for session in run.sessions()] == [[], []]


def test_a_killed_worker_of_the_second_node_is_a_death_that_names_its_rank(begin: Callable[..., Run]) -> None:
    run = begin()
    run.worker().kill()
    trial = run.report()["arms"][0]["trials"][0]
    assert trial["outcome"] == "other-crash"
    assert trial["death"]["ranks"] == [1]
    assert {"rank", "health", "process"} <= set(trial["death"]["channels"])
    text = (run.folder / "report.md").read_text(encoding="utf-8")
    assert "It began with rank 1: logs/reported-1.rank1.log" in text


def test_a_stopped_worker_of_the_second_node_is_a_hang(begin: Callable[..., Run]) -> None:
    run = begin("--answer-stall", "15")
    run.worker().send_signal(signal.SIGSTOP)
    trial = run.report()["arms"][0]["trials"][0]
    assert trial["outcome"] == "hang", trial["why"]
    assert "/health answers 200" in trial["why"]


def test_the_second_launcher_killed_is_no_death_and_its_orphan_is_ended(begin: Callable[..., Run]) -> None:
    run = begin()
    orphan = run.worker()
    psutil.Process(run.second_node()).kill()
    report = run.report()
    trial = report["arms"][0]["trials"][0]
    assert trial["outcome"] == "clean", trial["why"]
    assert trial["death"] is None
    assert trial["requests"] == {"sent": 1, "ok": 1, "failed": 0}
    assert any(entry["event"] == "rank-exited" and entry["rank"] == 1 for entry in run.journal())
    assert not orphan.is_running() or orphan.status() == psutil.STATUS_ZOMBIE
