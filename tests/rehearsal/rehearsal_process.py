"""A real fault server as a process, for tests."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.web import httpx

ENGINE = Path(__file__).resolve().parents[2] / "fixtures" / "rehearsal"
SMALL = (
    "--max-model-len",
    "4096",
    "--block-size",
    "32",
    "--max-num-batched-tokens",
    "256",
    "--max-num-seqs",
    "2",
)
TURBOQUANT = (*SMALL, "--kv-cache-dtype", "turboquant_4bit_nc")

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
DEAD_BODY = {"error": {"message": DEAD, "type": "InternalServerError", "param": None, "code": 500}}

_PATIENCE = 30.0
"""Seconds that any single wait of a test may take on a busy machine."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Running:
    """One server process, its log so far, and a client for it."""

    def __init__(self, argv: list[str], env: Mapping[str, str], log: Path, port: int) -> None:
        self._log_path = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, str(ENGINE), *argv, "--host", "127.0.0.1", "--port", str(port)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={"PATH": os.environ["PATH"], **env},
                start_new_session=True,
            )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=_PATIENCE)

    @property
    def log(self) -> str:
        return self._log_path.read_text(encoding="utf-8")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"no {what} in time; log:\n{self.log[-3000:]}"
            time.sleep(0.01)

    def ready(self) -> Running:
        self.until(lambda: self.health() == 200 or self.process.poll() is not None, "readiness")
        assert self.process.poll() is None, self.log
        return self

    def health(self) -> int | None:
        """Return the status of `/health`, None if nothing answers."""
        try:
            return self.client.get("/health").status_code
        except httpx.TransportError:
            return None

    def complete(self, prompt: str | list[int], **more: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, **more})

    def pid_of(self, process: str) -> int:
        """Return the pid that a process has in the log."""
        return int(self.log.split(f"({process} pid=")[1].split(")")[0])

    def metric(self, name: str) -> float:
        """Return the value of a series of `/metrics` whose name and labels begin with `name`."""
        lines = self.client.get("/metrics").text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def exit_code(self) -> int:
        return self.process.wait(_PATIENCE)

    def end(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        # A killed server leaves its children behind, as vLLM's does. They are in its session.
        with contextlib.suppress(ProcessLookupError):  # ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)


Start = Callable[..., Running]


def in_order(log: str, *texts: str) -> None:
    """Assert that the log holds the texts, one after the other."""
    at = 0
    for text in texts:
        found = log.find(text, at)
        assert found >= 0, f"{text!r} is missing, or comes too early, in:\n{log[-4000:]}"
        at = found + len(text)
