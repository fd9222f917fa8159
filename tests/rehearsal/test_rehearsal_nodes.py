"""One engine over two nodes: two `vllm serve`, and what the end of each part does to the other."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread

import httpx
import psutil
import pytest
from tests.rehearsal.rehearsal_process import DEAD_BODY, Running, Start, free_port, in_order

SHAPE = {
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "num_hidden_layers": 43, "vocab_size": 4096,
    "full_attention_interval": 1, "block_size": 256, "max_position_embeddings": 65536,
    "architecture": "DeepseekV4ForCausalLM",
}  # fmt: skip
BRANCH = "0.20.1rc1.dev12+g363ffa145"
FLAGS = (
    "--max-model-len",
    "16384",
    "--max-num-seqs",
    "4",
    "--max-num-batched-tokens",
    "8192",
    "-tp",
    "2",
    "--nnodes",
    "2",
)


class Pair:
    """The first node and the second one."""

    def __init__(self, start: Start, version: str, *flags: str) -> None:
        meeting = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
        self.head = start(version, *FLAGS, *meeting, "--node-rank", "0", *flags, shape=SHAPE)
        self.second = start(version, *FLAGS, *meeting, "--node-rank", "1", "--headless", *flags, shape=SHAPE)

    def ready(self) -> Pair:
        self.head.ready()
        return self

    @property
    def remote_worker(self) -> psutil.Process:
        (worker,) = psutil.Process(self.second.process.pid).children()
        return worker


@pytest.fixture
def orphans() -> Iterator[list[psutil.Process]]:
    found: list[psutil.Process] = []
    yield found
    for process in found:
        with suppress(psutil.NoSuchProcess):  # ended by itself
            process.kill()


def until(server: Running, text: str) -> None:
    server.until(lambda: text in server.log, repr(text))


def test_the_first_waits_for_the_second_and_serves(start: Start) -> None:
    pair = Pair(start, "0.32.0").ready()
    assert pair.head.complete([300] * 2000).status_code == 200
    assert pair.remote_worker.name() == "VLLM::Worker_TP"  # Linux keeps 15 letters
    in_order(
        pair.second.log,
        "(MainProcess pid=",
        "headless multiproc executor, with head node address 127.0.0.1:",
        "(Worker_TP1 pid=",
    )
    assert "(Worker_TP0 pid=" in pair.head.log
    assert pair.second.health() is None


def test_alone_it_is_never_ready_and_ends_when_told(start: Start) -> None:
    head = start("0.32.0", *FLAGS, "--master-port", str(free_port()), "--node-rank", "0", shape=SHAPE)
    until(head, "Starting to load model")
    time.sleep(0.2)
    assert head.health() is None
    head.process.terminate()
    assert head.exit_code() == 0


def test_both_ranks_die_of_the_reported_prompt_and_the_second_stays(start: Start) -> None:
    pair = Pair(start, BRANCH).ready()
    assert pair.head.complete([300] * 759).status_code == 200
    answer = pair.head.complete([301] * 1304)
    assert (answer.status_code, answer.text) == (500, DEAD_BODY)
    assert pair.head.exit_code() == 0
    asked = (
        "_forward_prefill' requires 21.80 MB, current size is 21.62 MB. Workspace growth is not allowed after locking."
    )
    until(pair.second, asked)
    for rank, log in ((0, pair.head.log), (1, pair.second.log)):
        assert sum(line.startswith(f"(Worker_TP{rank} ") and line.endswith(asked) for line in log.splitlines()) == 2
    assert "EngineCore encountered a fatal error" in pair.head.log
    assert "EngineCore" not in pair.second.log
    said = pair.second.log
    time.sleep(0.5)
    assert pair.second.process.poll() is None
    assert pair.second.log == said
    pair.second.process.terminate()
    assert pair.second.exit_code() == 0
    assert pair.second.log.endswith("workers still running after SIGTERM; sending SIGKILL\n")


def test_eager_lives(start: Start) -> None:
    pair = Pair(start, BRANCH, "--enforce-eager").ready()
    assert pair.head.complete([300] * 1304).status_code == 200
    assert pair.head.complete([301] * 5000).status_code == 200


def test_a_killed_worker_of_the_second_ends_both(start: Start) -> None:
    pair = Pair(start, "0.32.0").ready()
    pair.remote_worker.kill()
    answer = pair.head.complete([300] * 20)
    assert (answer.status_code, answer.text) == (500, DEAD_BODY)
    assert pair.head.exit_code() == 0
    in_order(
        pair.head.log, "(Worker_TP0 pid=", "WorkerProc hit an exception.", "in all_reduce",
        "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer",
        "EngineCore encountered a fatal error.",
    )  # fmt: skip
    assert pair.second.exit_code() == 0
    assert "Worker proc VllmWorker-1 died unexpectedly (exit code: None), shutting down executor." in pair.second.log


def test_a_stopped_worker_of_the_second_stops_the_engine(start: Start) -> None:
    pair = Pair(start, "0.32.0").ready()
    worker = pair.remote_worker
    worker.suspend()
    answers: list[httpx.Response] = []
    asking = Thread(target=lambda: answers.append(pair.head.complete([300] * 20)))
    asking.start()
    time.sleep(0.5)
    assert not answers
    assert pair.head.health() == 200
    worker.resume()
    asking.join()
    assert answers[0].status_code == 200


def test_without_the_second_launcher_the_engine_goes_on(start: Start, orphans: list[psutil.Process]) -> None:
    pair = Pair(start, "0.32.0").ready()
    worker = pair.remote_worker
    orphans.append(worker)
    os.kill(pair.second.process.pid, signal.SIGKILL)
    pair.second.process.wait()
    until(pair.second, "(Worker_TP1 pid=")
    until(pair.second, "Parent process exited, terminating worker queues")
    assert pair.head.complete([300] * 20).status_code == 200
    pair.head.process.terminate()
    assert pair.head.exit_code() == 0
    assert worker.is_running()


def test_a_node_without_its_model_says_so(start: Start, tmp_path: Path) -> None:
    server = start("0.32.0", *FLAGS, "--node-rank", "1", "--headless", model=str(tmp_path), shape=None)
    assert server.exit_code() == 1
    assert f"Invalid repository ID or local directory specified: '{tmp_path}'." in server.log
    assert "headless" not in server.log
