"""A real rehearsal server as a process, for tests."""

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

import httpx

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
TINY = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 1, "vocab_size": 4096,
    "full_attention_interval": 1, "block_size": 32, "max_position_embeddings": 4096,
    "architecture": "Qwen3ForCausalLM",
}  # fmt: skip
"""The shape that the workspace bug was measured with on a real vLLM."""

TINY_FLAGS = (
    "--max-model-len", "4096", "--block-size", "32", "--max-num-batched-tokens", "256", "--max-num-seqs", "2",
    "--kv-cache-dtype", "turboquant_4bit_nc",
)  # fmt: skip

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
DEAD_BODY = f'{{"error":{{"message":"{DEAD}","type":"InternalServerError","param":null,"code":500}}}}'
DEAD_EVENT = (
    f'data: {{"error": {{"message": "{DEAD}", "type": "InternalServerError", "param": null, "code": 500}}}}\n\n'
    "data: [DONE]\n\n"
)

GENEROUS = 20.0
"""Seconds that any single wait of a test may take on a busy machine."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Running:
    """One server process, its log so far, and a client for it."""

    def __init__(self, argv: list[str], env: Mapping[str, str], log: Path, port: int | None = None) -> None:
        self.port = port or free_port()
        self._log_path = log
        command = [sys.executable, str(FIXTURES / "rehearsal"), *argv, "--host", "127.0.0.1"]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={"PATH": os.environ["PATH"], **env},
                start_new_session=True,
            )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=GENEROUS)

    @property
    def log(self) -> str:
        return self._log_path.read_text(encoding="utf-8")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + GENEROUS
        while not condition():
            assert time.monotonic() < deadline, f"no {what} in time; log:\n{self.log[-3000:]}"
            time.sleep(0.01)

    def ready(self) -> Running:
        self.until(lambda: self.health() == 200 or self.process.poll() is not None, "readiness")
        assert self.process.poll() is None, self.log
        return self

    def health(self) -> int | None:
        try:
            return self.client.get("/health").status_code
        except httpx.TransportError:
            return None

    def complete(self, prompt: str | list[int], **more: Any) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, **more}
        return self.client.post("/v1/completions", json=body)

    def exit_code(self) -> int:
        return self.process.wait(GENEROUS)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series of /metrics."""
        for line in self.client.get("/metrics").text.splitlines():
            series, _, value = line.rpartition(" ")
            wanted = all(f'{key}="{text}"' in series for key, text in labels.items())
            if series.partition("{")[0] == name and wanted:
                return float(value)
        raise AssertionError(f"no series {name} {labels}")

    def end(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        # a killed server leaves its children behind, as vLLM's does: they are in its session
        with contextlib.suppress(ProcessLookupError):  # ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)


Start = Callable[..., Running]


def in_order(log: str, *texts: str) -> None:
    at = 0
    for text in texts:
        found = log.find(text, at)
        assert found >= 0, f"{text!r} is missing, or comes too early, in:\n{log[-4000:]}"
        at = found + len(text)
