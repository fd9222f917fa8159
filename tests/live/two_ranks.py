"""Run of one engine over two nodes in the background, for tests that signal its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import psutil

SCENARIO = Path(__file__).parents[1] / "data" / "declared" / "two_ranks.py"


def growing(size: Callable[[], int], seconds: float) -> Iterator[None]:
    """Yield five times a second; fail if the size stays the same for so many seconds."""
    last, grown = -1, time.monotonic()
    while True:
        if (now := size()) != last:
            last, grown = now, time.monotonic()
        assert time.monotonic() - grown < seconds, "no progress"
        time.sleep(0.2)
        yield


@dataclass
class Run:
    """A run in the background whose long request is in flight."""

    process: subprocess.Popen[bytes]
    folder: Path

    def journal(self) -> list[dict[str, Any]]:
        text = (self.folder / "journal.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def sent(self, request: str) -> int:
        """Return how often this request was sent."""
        return sum(
            (entry["event"], entry.get("name")) == ("request-sent", request)
            for entry in self.journal()
        )

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = next(
            entry for entry in self.journal() if entry["event"] == "server-started"
        )["facts"]
        return facts

    def second_node(self) -> psutil.Process:
        return self.node(1)

    def node(self, number: int) -> psutil.Process:
        """Return the first process of a rank: its `vllm serve`, or the child of Docker's init."""
        rank = [self.facts(), *self.facts()["ranks"]][number]
        if rank["pid"] is not None:
            return psutil.Process(int(rank["pid"]))
        client = docker.from_env()
        try:
            return psutil.Process(
                int(client.api.inspect_container(rank["container_id"])["State"]["Pid"])
            )
        finally:
            client.close()

    def worker(self, number: int = 1) -> psutil.Process:
        """Return the worker of a rank."""
        children = self.node(number).children(recursive=True)
        return next(
            child for child in children if f"Worker_TP{number}" in " ".join(child.cmdline())
        )

    def report(self) -> dict[str, Any]:
        """Return the report of the ended run. Wait as long as logs and journal grow."""
        progress = growing(self.written, 240)
        while self.process.poll() is None:
            next(progress)
        report: dict[str, Any] = json.loads(
            (self.folder / "report.json").read_text(encoding="utf-8")
        )
        return report

    def written(self) -> int:
        """Return the size in bytes of the run's journal and logs."""
        return sum(
            path.stat().st_size
            for path in (self.folder / "journal.jsonl", *(self.folder / "logs").iterdir())
        )

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=120)


def begin(
    out: Path,
    *options: str,
    within: Sequence[str] = (),
    scenario: Path = SCENARIO,
    request: str = "long answer",
) -> Run:
    """Start a run and return once this request was sent.

    The caller ends it. within: the words of a command that runs it.
    """
    command = [*within, sys.executable, "-m", "vllm_repro", "run", str(scenario)]
    process = subprocess.Popen(
        [*command, "--out", str(out), *options],
        env={**os.environ, "CI": "true"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        while not (folders := list(out.glob("*/2*/journal.jsonl"))):
            assert process.poll() is None
            time.sleep(0.1)
        run = Run(process, folders[0].parent)
        progress = growing(run.written, 240)
        while not run.sent(request):
            assert process.poll() is None, "the run ended before that request"
            next(progress)
    except BaseException:
        process.terminate()
        process.wait(timeout=120)
        raise
    return run
