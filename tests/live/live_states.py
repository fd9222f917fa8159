"""States of a real server, each read by `vllm-repro diagnose --pid`, as a table.

    python -m tests.live.live_states [RELEASE] [OUT.jsonl]

One boot of a tiny model on two CPU ranks. A plugin blocks what a file names until that is removed:
a worker, all workers, the scheduler or the API server; signals stop processes. Scenarios that hang
are read by their own runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from unittest import mock

from vllm_repro.host.ports import free_port
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import parse_source
from vllm_repro_diagnosis import live
from vllm_repro_diagnosis.standstill import Reading, Role, judge

PLUGIN = """
import os, time
FILE = os.environ["BLOCK_FILE"]

def block(name):
    try:
        text = open(FILE).read().split()
    except OSError:
        return
    while text[:1] == ["spin"] and text[1] == name and os.path.exists(FILE):
        pass
    if text[:1] == ["sleep"] and text[1] == name:
        open(FILE + ".pipe").read()  # sleeps until somebody writes

def wrap(owner, function, name):
    before = getattr(owner, function)
    if getattr(before, "blocks", False):
        return
    def around(*arguments, **options):
        block(name(*arguments) if callable(name) else name)
        return before(*arguments, **options)
    around.blocks = True
    setattr(owner, function, around)

def rank(runner, *_):
    from vllm.distributed import get_tensor_model_parallel_rank
    number = get_tensor_model_parallel_rank()
    block("workers")
    return f"worker{number}"

def register():
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    wrap(Scheduler, "schedule", "scheduler")
    wrap(GPUModelRunner, "_model_forward", rank)
    wrap(AsyncLLM, "generate", "api")
"""
LONG = [17] * 30_000


class Server:
    """A vLLM server with two ranks."""

    def __init__(self, release: str, folder: Path) -> None:
        found = ReleaseCache().get(parse_source(release))
        assert found is not None, f"install vLLM {release} first"
        models = sorted(Path(ReleaseCache().root / "models").glob("qwen3-2x16x8x128-*"))
        plugin = folder / "blocks-0.1.dist-info"
        plugin.mkdir()
        (folder / "blocks.py").write_text(PLUGIN)
        (plugin / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nblocks = blocks:register\n"
        )
        (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: blocks\nVersion: 0.1\n")
        self.file, self.pipe = folder / "block", folder / "block.pipe"
        os.mkfifo(self.pipe)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        words = f"""{found.executable} serve {models[0]} --host 127.0.0.1 --port {self.port}
            --served-model-name tiny --load-format dummy --dtype bfloat16 --max-model-len 32768
            --max-num-batched-tokens 32768 --max-num-seqs 4 --enforce-eager
            --no-enable-prefix-caching --tensor-parallel-size 2""".split()
        settings = {
            "PYTHONPATH": str(folder),
            "BLOCK_FILE": str(self.file),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        with (folder / "server.log").open("wb") as log:
            self.process = subprocess.Popen(
                words,
                env={**os.environ, **settings},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def pids(self, role: Role) -> list[int]:
        """Return its processes of a role, the lowest rank first."""
        names = {pid: live.command_of(pid) for pid in live.tree_of(self.process.pid)}
        found = [pid for pid, name in names.items() if live.role_of(name) is role]
        return sorted(found, key=names.__getitem__) or [self.process.pid]

    def answers(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"{self.url}/health", timeout=2).status == 200)
        return False

    def ask(self, prompt: str | list[int], tokens: int, *, reads: bool = True) -> socket.socket:
        """Send a request that streams. reads: False for a client that does not read its answer."""
        body = json.dumps(
            {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "stream": True}
            | {"ignore_eos": True, "logprobs": None if reads else 20}
        )
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", self.port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        client.sendall(
            f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode()
        )
        if reads:
            threading.Thread(
                target=lambda: [None for _ in iter(lambda: _read(client), b"")], daemon=True
            ).start()
        return client

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _read(client: socket.socket) -> bytes:
    with contextlib.suppress(OSError):
        return client.recv(65536)
    return b""


@contextlib.contextmanager
def blocked(server: Server, what: str) -> Iterator[None]:
    """Block a part of the server from its next call on, with a request pending."""
    server.file.write_text(what)
    client = server.ask("hello", 4000)
    time.sleep(3)
    yield
    server.file.unlink()
    with contextlib.suppress(OSError):  # wakes whoever waits at the pipe
        for _ in range(4):
            os.close(os.open(server.pipe, os.O_WRONLY | os.O_NONBLOCK))
            time.sleep(0.1)
    client.close()


@contextlib.contextmanager
def stopped(server: Server, role: Role, *, asked: bool = True) -> Iterator[None]:
    pid = server.pids(role)[-1]
    client = server.ask("hello", 4000) if asked else None
    time.sleep(2)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(1)
    yield
    os.kill(pid, signal.SIGCONT)
    if client is not None:
        client.close()


@contextlib.contextmanager
def asked(
    server: Server, prompt: str | list[int], tokens: int, wait: float, *, reads: bool = True
) -> Iterator[None]:
    client = server.ask(prompt, tokens, reads=reads)
    time.sleep(wait)
    yield
    client.close()


Case = tuple[str, set[str], Callable[[Server], contextlib.AbstractContextManager[None]]]
SLOW, IDLE = "slow but alive", "idle"
SCHEDULER, WORKER, API = (
    "hang in the scheduler (EngineCore)",
    "hang in a worker or collective",
    "hang in the API server",
)
CASES: list[Case] = [
    ("idle", {IDLE}, lambda _: contextlib.nullcontext()),
    ("first request", {SLOW}, lambda server: asked(server, "hello", 200, 3)),
    ("decode", {SLOW}, lambda server: asked(server, "hello", 20_000, 2)),
    ("long prefill", {SLOW}, lambda server: asked(server, LONG, 4, 2)),
    ("slow client", {SLOW, IDLE}, lambda server: asked(server, "hello", 3000, 40, reads=False)),
    ("EngineCore stopped", {SCHEDULER}, lambda server: stopped(server, Role.ENGINE)),
    (
        "EngineCore stopped, idle",
        {SCHEDULER},
        lambda server: stopped(server, Role.ENGINE, asked=False),
    ),
    ("API server stopped", {API}, lambda server: stopped(server, Role.API)),
    ("worker stopped", {WORKER}, lambda server: stopped(server, Role.WORKER)),
    (
        "a worker sleeps, its peer in a collective",
        {WORKER},
        lambda server: blocked(server, "sleep worker1"),
    ),
    ("all workers sleep", {WORKER}, lambda server: blocked(server, "sleep workers")),
    ("the scheduler sleeps", {SCHEDULER}, lambda server: blocked(server, "sleep scheduler")),
    ("the scheduler loops", {SCHEDULER}, lambda server: blocked(server, "spin scheduler")),
    ("the API server sleeps", {API}, lambda server: blocked(server, "sleep api")),
    ("idle again", {IDLE}, lambda _: contextlib.nullcontext()),
]


def read(server: Server, *, stacks: bool) -> tuple[Reading, float]:
    began = time.monotonic()
    without = mock.patch.object(live, "stacks_of", return_value=())
    with contextlib.nullcontext() if stacks else without:
        pids = live.tree_of(server.pids(Role.ENGINE)[0])
        return live.observe(pids=pids), time.monotonic() - began


def main(release: str = "0.32.0", out: str = "live-states.jsonl") -> None:
    with tempfile.TemporaryDirectory() as name, Path(out).open("a") as rows:
        server = Server(release, Path(name))
        try:
            for _ in range(900):
                if server.answers():
                    break
                time.sleep(1)
            time.sleep(6)
            for case, right, begin in CASES:
                with begin(server):
                    for stacks in (True, False):
                        reading, took = read(server, stacks=stacks)
                        finding = judge(reading)
                        row: dict[str, object] = {
                            "case": case,
                            "stacks": stacks,
                            "took": round(took, 1),
                        }
                        row |= {"right": finding.kind in right, "kind": finding.kind}
                        rows.write(json.dumps(row | {"reading": asdict(reading)}) + "\n")
                        rows.flush()
                        print(row, finding.why, flush=True)
                for _ in range(120):
                    time.sleep(1)
                    if server.answers():
                        break
                time.sleep(8)
        finally:
            print((Path(name) / "server.log").read_text()[-1500:] if not server.answers() else "")
            server.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
