"""Ordered faults as seen from outside."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from rehearsal.faults import Fault, FaultKind, parse
from tests.rehearsal.rehearsal_process import DEAD, DEAD_BODY, Start, in_order
from tests.web import httpx


def test_orders_are_read() -> None:
    assert (parse(""), parse("slow-boot:2.5")) == (Fault(), Fault(FaultKind.SLOW_BOOT, 2.5))
    with pytest.raises(ValueError, match="known are hang, busy"):
        parse("explode")


@pytest.mark.parametrize(
    ("kind", "hits"), [(FaultKind.HANG, [2, 3]), (FaultKind.GARBAGE, [2, 3]), (FaultKind.KILL, [2])]
)
def test_only_hangs_and_wrong_answers_go_on(kind: FaultKind, hits: list[int]) -> None:
    assert [number for number in (1, 2, 3) if Fault(kind, 2).hits(kind, number)] == hits


def test_an_unknown_fault_is_wrong_usage(start: Start) -> None:
    assert start("0.23.0", fault="explode").exit_code() == 64


def test_a_hung_engine_is_healthy_and_gives_no_token(start: Start) -> None:
    server = start("0.23.0", fault="hang:2", env={"VLLM_LOG_STATS_INTERVAL": "0.2"}).ready()
    assert server.complete("a").status_code == 200
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/completions", json={"prompt": "b"}, timeout=0.5)
    assert (server.health(), server.metric("vllm:num_requests_running")) == (200, 1)
    server.until(
        lambda: "Avg generation throughput: 0.0 tokens/s, Running: 1 reqs" in server.log,
        "stalled line",
    )
    server.process.terminate()
    assert server.exit_code() == 0


def test_a_killed_engine_logs_no_fatal_line(start: Start) -> None:
    server = start("0.23.0", fault="kill:2").ready()
    assert server.complete("a").status_code == 200
    answer = server.complete("a")
    assert (answer.status_code, answer.json()) == (500, DEAD_BODY)
    assert server.exit_code() == 0
    assert "fatal error" not in server.log
    in_order(server.log, "AsyncLLM output_handler failed.", "EngineDeadError", "Shutting down")


@pytest.mark.parametrize(
    ("process", "texts"),
    [
        ("EngineCore", ("engine core exited unexpectedly", "AsyncLLM output_handler failed.")),
        (
            "Worker",
            ("Worker proc VllmWorker-0 died unexpectedly", "EngineCore encountered a fatal error."),
        ),
    ],
)
def test_a_process_that_is_killed_takes_the_engine_along(
    start: Start, process: str, texts: tuple[str, ...]
) -> None:
    env = {"VLLM_WATCHDOG_TIME_S": "0.3", "VLLM_REHEARSAL_EXECUTOR": "mp"}
    server = start("0.28.0", env=env).ready()
    pid = server.pid_of(process)
    assert Path(f"/proc/{pid}/comm").read_text().startswith(f"VLLM::{process}"[:15])
    os.kill(pid, signal.SIGKILL)
    assert server.exit_code() == 0
    in_order(server.log, *texts)


def test_another_death_matches_no_known_bug(start: Start) -> None:
    server = start("0.23.0", fault="other").ready()
    assert (server.complete("a").json(), server.exit_code()) == (DEAD_BODY, 0)
    in_order(
        server.log, "EngineCore encountered a fatal error.", "in allocate_slots", "AssertionError\n"
    )


def test_garbage_is_one_token_over_and_over(start: Start) -> None:
    server = start("0.23.0", fault="garbage:2").ready()
    healthy, garbage = (
        server.complete("a", max_tokens=40).json()["choices"][0]["text"].split() for _ in range(2)
    )
    assert (len(set(healthy)) > 10, len(set(garbage)), len(garbage)) == (True, 1, 40)


def test_a_stream_of_a_dead_engine_ends_with_an_error_event(start: Start) -> None:
    server = start("0.23.0", fault="other", env={"VLLM_WATCHDOG_TIME_S": "0.3"}).ready()
    text = server.complete("a", stream=True).text
    assert DEAD in text
    assert text.endswith("data: [DONE]\n\n")
    assert server.exit_code() == 0, "the watchdog ends a server that only streams waited for"
    assert "Error in completion stream generator." in server.log


def test_a_server_told_to_outlive_its_engine_answers_503(start: Start) -> None:
    server = start("0.23.0", fault="other", env={"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}).ready()
    assert (server.complete("a").status_code, server.health()) == (500, 503)
    assert server.complete("a").json() == DEAD_BODY
