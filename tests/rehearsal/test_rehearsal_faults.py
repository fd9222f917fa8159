"""Every ordered fault shows what a real vLLM shows in that state."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from rehearsal.faults import Fault, FaultKind, parse
from tests.rehearsal.rehearsal_process import DEAD_BODY, DEAD_EVENT, Start, in_order


def test_reading_the_order() -> None:
    assert parse(None) is None
    assert parse("hang") == Fault(FaultKind.HANG, 1)
    assert parse("slow-boot:2.5") == Fault(FaultKind.SLOW_BOOT, 2.5)
    assert parse("kill:3") == Fault(FaultKind.KILL, 3)
    for wrong in ("explode", "kill:soon"):
        with pytest.raises(ValueError, match="VLLM_REHEARSAL_FAULT"):
            parse(wrong)


def test_unknown_fault_is_wrong_usage(start: Start) -> None:
    assert start("0.23.0", fault="explode").exit_code() == 64


def test_hang(start: Start) -> None:
    server = start("0.23.0", fault="hang:2", env={"VLLM_LOG_STATS_INTERVAL": "0.2"}).ready()
    assert server.complete("a").status_code == 200
    impatient = httpx.Timeout(0.5)
    for _ in range(2):
        with pytest.raises(httpx.ReadTimeout):
            server.client.post("/v1/completions", json={"prompt": "b", "max_tokens": 2}, timeout=impatient)
        assert server.health() == 200
    body = {"prompt": "b", "max_tokens": 2, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body, timeout=1.0) as stream:
        assert stream.status_code == 200
        line = "generation throughput: 0.0 tokens/s, Running: 0 reqs, Waiting: 1 reqs"
        server.until(lambda: line in server.log, "line")
        assert server.client.get("/v1/models").status_code == 200
        events = stream.iter_text()
        with pytest.raises(httpx.ReadTimeout):
            next(events)
    assert "ERROR" not in server.log


def test_hung_requests_show_as_running(start: Start) -> None:
    server = start("0.23.0", fault="hang", env={"VLLM_LOG_STATS_INTERVAL": "0.2"}).ready()
    with server.client.stream("POST", "/v1/completions", json={"prompt": "b", "stream": True}) as stream:
        assert stream.status_code == 200
        line = "generation throughput: 0.0 tokens/s, Running: 1 reqs, Waiting: 0 reqs"
        server.until(lambda: line in server.log, "line")


def test_hung_server_waits_for_its_clients(start: Start) -> None:
    server = start("0.23.0", fault="hang").ready()
    with server.client.stream("POST", "/v1/completions", json={"prompt": "b", "stream": True}) as stream:
        assert stream.status_code == 200
        server.process.send_signal(signal.SIGTERM)
        server.until(lambda: "Waiting for connections to close. (CTRL+C to force quit)" in server.log, "line")
        time.sleep(0.3)
        assert server.process.poll() is None
    assert server.exit_code() == 0


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("0.19.1", "Engine core proc EngineCore_0 died unexpectedly, shutting down client."),
        ("0.20.2", None),
        ("0.32.0", "[shutdown] MPClient: engine core exited unexpectedly; starting cleanup"),
    ],
)
def test_kill(start: Start, version: str, said: str | None) -> None:
    server = start(version, fault="kill:2", env={"VLLM_REHEARSAL_STEP_MS": "20"}).ready()
    assert server.complete("a").status_code == 200
    answer = server.complete("a", max_tokens=1000)
    assert (answer.status_code, answer.text) == (500, DEAD_BODY)
    assert server.exit_code() == 0
    assert "fatal error" not in server.log
    if said:
        assert said in server.log
    else:
        assert "unexpectedly" not in server.log
    in_order(server.log, "AsyncLLM output_handler failed.", "EngineDeadError", "Shutting down")


def test_killing_the_engines_process_kills_the_engine(start: Start) -> None:
    server = start("0.32.0", env={"VLLM_WATCHDOG_TIME_S": "0.5", "VLLM_REHEARSAL_STEP_MS": "20"}).ready()
    core = int(server.log.split("(EngineCore pid=")[1].split(")")[0])
    assert core != server.process.pid
    os.kill(core, signal.SIGKILL)
    server.until(lambda: server.health() in (503, None), "503")
    assert server.exit_code() == 0
    assert "engine core exited unexpectedly" in server.log


def test_killing_the_worker_kills_the_engine(start: Start) -> None:
    server = start("0.28.0", executor="mp", env={"VLLM_WATCHDOG_TIME_S": "0.5"}).ready()
    worker = int(server.log.split("(Worker pid=")[1].split(")")[0])
    assert Path(f"/proc/{worker}/comm").read_text() == "VLLM::Worker\n"
    os.kill(worker, signal.SIGKILL)
    assert server.exit_code() == 0
    in_order(
        server.log,
        "Worker proc VllmWorker-0 died unexpectedly (exit code: -9), shutting down executor.",
        "EngineCore encountered a fatal error.",
        "AsyncLLM output_handler failed.",
    )


def test_empty(start: Start) -> None:
    server = start("0.23.0", fault="empty:2").ready()
    assert server.complete("a").json()["usage"]["completion_tokens"] == 2
    answer = server.complete("a")
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == ""
    assert answer.json()["usage"]["completion_tokens"] == 0
    assert server.complete("a", stream=True).text.endswith("data: [DONE]\n\n")


def test_truncate(start: Start) -> None:
    server = start("0.23.0", fault="truncate").ready()
    text = server.complete("a", max_tokens=8, stream=True).text
    assert "[DONE]" not in text
    events = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None]
    with pytest.raises(httpx.RemoteProtocolError):
        server.complete("a")
    assert server.health() == 200


def test_boot(start: Start) -> None:
    server = start("0.23.0", fault="boot")
    assert server.exit_code() == 1
    in_order(
        server.log,
        "[core.py:1195] EngineCore failed to start.",
        "torch.OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}",
    )
    assert "Application startup complete" not in server.log


def test_slow_boot(start: Start) -> None:
    began = time.monotonic()
    server = start("0.23.0", fault="slow-boot:1").ready()
    assert time.monotonic() - began > 1
    in_order(server.log, "shards:   0% Completed | 0/4", "shards: 100% Completed | 4/4", "startup complete")


def test_stuck_boot(start: Start) -> None:
    server = start("0.23.0", fault="stuck-boot")
    server.until(lambda: "Starting to load model" in server.log, "loading")
    before = server.log
    time.sleep(0.5)
    assert server.log == before or server.log.startswith(before)
    assert "startup complete" not in server.log
    assert server.health() is None
    server.process.terminate()
    assert server.exit_code() == 1


def test_other(start: Start) -> None:
    server = start("0.23.0", fault="other:2").ready()
    assert server.complete("a").status_code == 200
    assert server.complete("a").text == DEAD_BODY
    assert server.exit_code() == 0
    in_order(
        server.log, "EngineCore encountered a fatal error.", "in schedule", "in allocate_slots", "AssertionError\n"
    )
    assert "Workspace" not in server.log


def test_restart(start: Start) -> None:
    server = start("0.23.0", fault="restart:2").ready()
    server.complete("a")
    began = server.metric("process_start_time_seconds")
    with pytest.raises(httpx.RemoteProtocolError):
        server.complete("a")
    assert server.complete("a").status_code == 200
    assert server.metric("process_start_time_seconds") > began
    assert server.metric("vllm:generation_tokens_total") == 2
    assert "ERROR" not in server.log


def test_garbage(start: Start) -> None:
    server = start("0.23.0", fault="garbage:2").ready()
    healthy = server.complete("a", max_tokens=40).json()["choices"][0]["text"]
    assert len(set(healthy.split())) > 10
    garbage = server.complete("a", max_tokens=40).json()["choices"][0]["text"]
    assert len(set(garbage.split())) == 1
    assert len(garbage.split()) == 40


def test_exit(start: Start) -> None:
    server = start("0.23.0", fault="exit")
    assert server.exit_code() == 1
    assert server.log.splitlines() == [
        "REHEARSAL engine of vllm-repro, behaving as vLLM 0.23.0: it says nothing about vLLM"
    ]


def test_dead_stream_of_a_killed_engine(start: Start) -> None:
    env = {"VLLM_REHEARSAL_STEP_MS": "20", "VLLM_WATCHDOG_TIME_S": "0.5"}
    server = start("0.23.0", fault="kill", env=env).ready()
    assert server.complete("a", max_tokens=1000, stream=True).text.endswith(DEAD_EVENT)
    assert server.exit_code() == 0
