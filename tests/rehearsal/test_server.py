"""Contract of the fault server: label, endpoints, log, processes, faults, exit."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rehearsal.arguments import UsageError, parse
from rehearsal.engine import boot_rule
from rehearsal.faults import Fault, FaultKind
from rehearsal.faults import parse as parse_fault
from rehearsal.log import traceback
from rehearsal.rules import RULES, Asked, Effect
from rehearsal.settings import Settings, read
from tests.rehearsal.rehearsal_process import (
    DEAD,
    DEAD_BODY,
    SMALL,
    TURBOQUANT,
    Running,
    Start,
    free_port,
    in_order,
)
from tests.web import httpx

from vllm_repro.servers.site import IMITATED

BRANCH = "0.20.1rc1.dev12+g363ffa145"


def test_endpoints_say_what_they_are(start: Start) -> None:
    server = start("0.23.0").ready()
    assert server.log.startswith("REHEARSAL engine of vllm-repro, behaving as vLLM 0.23.0")
    answers = [server.client.get(path) for path in ("/health", "/version", "/nowhere")]
    answers.append(server.complete("a", stream=True))
    assert {answer.headers["x-vllm-rehearsal"] for answer in answers} == {"1"}
    assert server.client.get("/version").json() == {"version": "0.23.0"}
    (card,) = server.client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("tiny/model", 4096)
    body = server.complete("hello", max_tokens=3, return_token_ids=True).json()
    assert body["usage"] == {
        "prompt_tokens": 1,
        "total_tokens": 4,
        "completion_tokens": 3,
        "prompt_tokens_details": None,
    }
    (choice,) = body["choices"]
    assert (choice["finish_reason"], len(choice["token_ids"]), len(choice["text"].split())) == (
        "length",
        3,
        3,
    )
    again = server.complete("hello", max_tokens=3).json()
    assert again["choices"][0]["text"] == choice["text"], "greedy"


def test_chats_are_streamed_with_usage(start: Start) -> None:
    server = start("0.23.0").ready()
    messages = [{"role": "user", "content": "hello"}]
    counted = server.client.post("/tokenize", json={"messages": messages}).json()["count"]
    body = {
        "messages": messages,
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text = server.client.post("/v1/chat/completions", json=body).text
    *events, done = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    *pieces, last = map(json.loads, events)
    assert done == "[DONE]"
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None, None, "length"]
    assert all(piece["choices"][0]["delta"]["content"] for piece in pieces)
    assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], counted)


def test_counters(start: Start) -> None:
    server = start("0.23.0", *SMALL, "--enable-prompt-tokens-details").ready()
    prompt = [300] * 700
    assert server.complete(prompt).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert server.complete(prompt).json()["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 672
    }
    assert server.metric("vllm:prompt_tokens_total") == 1400
    assert server.metric("vllm:generation_tokens_total") == 4
    assert server.metric("vllm:prefix_cache_hits_total") == 672
    # vLLM counts a prompt in the step of its first token, however many chunks it took.
    assert server.metric("vllm:iteration_tokens_total_count") == 4
    assert server.metric("vllm:iteration_tokens_total_sum") == 701 + 29 + 2
    assert server.metric("vllm:num_requests_running") == 0


def test_boot_facts_are_in_the_log(start: Start) -> None:
    in_order(
        start("0.23.0", *TURBOQUANT).ready().log,
        "version 0.23.0",
        "non-default args: {'model_tag': 'tiny/model', 'max_model_len': 4096",
        "Chunked prefill is enabled with max_num_batched_tokens=256.",
        "Initializing a V1 LLM engine (v0.23.0) with config: ",
        "Using TURBOQUANT attention backend",
        "GPU KV cache size: 16,384 tokens",
        "Graph capturing finished in ",
        "Application startup complete.",
    )


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_a_known_death_in_vllms_order(start: Start, executor: str) -> None:
    server = start("0.23.0", *TURBOQUANT, env={"VLLM_REHEARSAL_EXECUTOR": executor}).ready()
    assert server.complete([300] * 384).status_code == 200
    answer = server.complete([301] * 385)
    assert (answer.status_code, answer.json()) == (500, DEAD_BODY)
    assert server.exit_code() == 0
    assert server.health() is None
    worker = (
        "WorkerProc hit an exception.",
        "Dumping scheduler output for model execution: SchedulerOutput(",
        "num_computed_tokens=[256]",
        "total_num_scheduled_tokens=129",
    )
    in_order(
        server.log,
        *(worker if executor == "mp" else ()),
        "EngineCore encountered a fatal error.",
        "Workspace is locked but allocation from 'turboquant_attn.py:747:_continuation_prefill'"
        " requires 16.00 MB",
        "AsyncLLM output_handler failed.",
        '"POST /v1/completions HTTP/1.1" 500 Internal Server Error',
        "Application shutdown complete.",
        "Finished server process [",
    )
    assert ("WorkerProc" in server.log) is (executor == "mp")


def test_a_release_that_repeats_itself(start: Start) -> None:
    drafts = ("--speculative-config", '{"method":"mtp","num_speculative_tokens":3}')
    text = (
        start("0.24.0", *TURBOQUANT, *drafts)
        .ready()
        .complete("a", max_tokens=40)
        .json()["choices"][0]["text"]
    )
    assert len(set(text.split())) == 1


@pytest.mark.parametrize("version", ["0.23.0", "0.28.0"])
def test_sigterm_ends_it_in_order(start: Start, version: str) -> None:
    server = start(version).ready()
    core = psutil.Process(server.pid_of("EngineCore"))
    server.process.terminate()
    assert server.exit_code() == 0
    assert not core.is_running()
    assert "EngineDeadError" not in server.log
    assert ("[shutdown] API server: shutdown triggered" in server.log) is (version == "0.28.0")
    in_order(server.log, "Shutting down", "Application shutdown complete.")


def test_a_signal_is_noticed_whichever_thread_gets_it(start: Start) -> None:
    server = start("0.23.0").ready()
    pid = server.process.pid
    other = next(
        int(thread.name)
        for thread in Path(f"/proc/{pid}/task").iterdir()
        if int(thread.name) != pid
    )
    assert ctypes.CDLL(None).tgkill(pid, other, signal.SIGTERM) == 0
    assert server.exit_code() == 0


def test_a_killed_api_server_leaves_the_engine_behind(start: Start) -> None:
    server = start("0.23.0").ready()
    core = server.pid_of("EngineCore")
    server.process.kill()
    server.process.wait()
    assert Path(f"/proc/{core}/comm").read_text().startswith("VLLM::EngineCor")


def test_a_port_in_use_ends_the_boot(start: Start) -> None:
    port = free_port()
    start("0.23.0", port=port).ready()
    second = start("0.23.0", port=port)
    assert second.exit_code() == 1
    assert "OSError: [Errno 98] Address already in use" in second.log


def test_many_requests_at_once(start: Start) -> None:
    server = start("0.23.0", env={"VLLM_REHEARSAL_STEP_MS": "5"}).ready()
    body = {"prompt": "a", "max_tokens": 4000, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert server.complete("b").status_code == 200
        assert server.metric("vllm:num_requests_running") == 1
    server.until(
        lambda: server.metric("vllm:num_requests_running") == 0,
        "end of a request whose client left",
    )


class Nodes:
    """Head and headless follower of one engine."""

    def __init__(self, start: Start) -> None:
        meeting = (
            "--nnodes",
            "2",
            "-tp",
            "2",
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            str(free_port()),
        )
        self.head: Running = start(BRANCH, *meeting, "--node-rank", "0")
        self.follower: Running = start(BRANCH, *meeting, "--node-rank", "1", "--headless")


def test_two_nodes_die_of_the_same_and_the_follower_stays(start: Start) -> None:
    nodes = Nodes(start)
    nodes.head.ready()
    assert nodes.head.complete([300] * 759).status_code == 200
    assert (nodes.head.complete([301] * 760).json(), nodes.head.exit_code()) == (DEAD_BODY, 0)
    asked = "_forward_prefill' requires 21.80 MB, current size is 21.62 MB"
    nodes.follower.until(lambda: asked in nodes.follower.log, "the exception")
    for rank, server in enumerate((nodes.head, nodes.follower)):
        assert any(
            line.startswith(f"(Worker_TP{rank} ") and asked in line
            for line in server.log.splitlines()
        )
    time.sleep(0.3)
    assert nodes.follower.process.poll() is None
    nodes.follower.process.terminate()
    assert nodes.follower.exit_code() == 0


def test_flags_are_read_in_every_form() -> None:
    words = [
        "m",
        "--max_num_seqs=4",
        "-tp",
        "2",
        "-O3",
        "-cc.cudagraph_mode=none",
        "--no-enable-prefix-caching",
    ]
    model, options = parse(
        ["serve", *words, "--api-key", "a", "b", "--seed", "-1", '--x-config={"a":1}']
    )
    assert model == "m"
    assert options == {
        "max-num-seqs": "4",
        "tensor-parallel-size": "2",
        "optimization-level": "3",
        "compilation-config": {"cudagraph_mode": "none"},
        "enable-prefix-caching": False,
        "api-key": ["a", "b"],
        "seed": "-1",
        "x-config": {"a": 1},
    }
    assert parse(["--model", "m", "--enforce-eager"]) == (
        "m",
        {"model": "m", "enforce-eager": True},
    )


def test_what_vllm_refuses_is_refused(start: Start) -> None:
    with pytest.raises(UsageError, match="invalid int value: 'some'"):
        read(["serve", "m", "--port", "some"], {})
    server = start("0.19.1", *TURBOQUANT)
    assert server.exit_code() == 2
    assert (
        "vllm serve: error: argument --kv-cache-dtype: invalid choice: 'turboquant_4bit_nc'"
        in server.log
    )


def test_orders_are_read() -> None:
    assert (parse_fault(""), parse_fault("slow-boot:2.5")) == (
        Fault(),
        Fault(FaultKind.SLOW_BOOT, 2.5),
    )
    with pytest.raises(ValueError, match="known are hang, busy"):
        parse_fault("explode")


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


@pytest.mark.parametrize(
    ("fault", "answered", "texts"),
    [
        ("kill:2", 1, ("AsyncLLM output_handler failed.", "EngineDeadError", "Shutting down")),
        # it matches no known bug
        (
            "other",
            0,
            ("EngineCore encountered a fatal error.", "in allocate_slots", "AssertionError\n"),
        ),
    ],
)
def test_only_an_engine_that_dies_itself_logs_a_fatal_line(
    start: Start, fault: str, answered: int, texts: tuple[str, ...]
) -> None:
    server = start("0.23.0", fault=fault).ready()
    answers = [server.complete("a") for _ in range(answered + 1)]
    assert [answer.status_code for answer in answers] == [*[200] * answered, 500]
    assert (answers[-1].json(), server.exit_code()) == (DEAD_BODY, 0)
    assert ("fatal error" in server.log) is (fault == "other")
    in_order(server.log, *texts)


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


DRAFTS = ("--speculative-config", '{"method":"mtp","num_speculative_tokens":3}')
EAGER, PIECEWISE = ("--enforce-eager",), ("-cc.cudagraph_mode=piecewise",)
UNCHUNKED = (*TURBOQUANT, "--no-enable-chunked-prefill")


def offload(size: int, **extra: bool) -> tuple[str, ...]:
    given = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": size, **extra},
    }
    return (
        "--block-size=256",
        "--max-model-len=128000",
        "--max-num-batched-tokens=16384",
        "--no-disable-hybrid-kv-cache-manager",
        f"--kv-transfer-config={json.dumps(given)}",
    )


LARGE, SMALL_POOL = 1 << 37, 1 << 32
OFFLOAD = offload(LARGE)


def settings(version: str, flags: tuple[str, ...], **shape: Any) -> Settings:
    env = {"VLLM_REHEARSAL_VERSION": version, "VLLM_REHEARSAL_SHAPE": json.dumps(shape)}
    return read(["serve", "m", *flags], env)


def deaths(given: Settings, **asked: Any) -> set[str]:
    """Return the issues whose boundary a request crosses."""
    usual: dict[str, Any] = {
        "prompt": 20,
        "cached": 0,
        "max_tokens": 8,
        "min_tokens": 0,
        "stop_token_ids": (),
    }
    request = Asked(settings=given, **{**usual, **asked})
    rules = (rule for rule in RULES if rule.effect is Effect.DIES and rule.applies(given))
    return {rule.issue.partition("#")[2] for rule in rules if rule.asked(request)}


@pytest.mark.parametrize(
    ("version", "flags", "request_of", "issues"),
    [
        # 41726: a continuation of more than 128 tokens, after a chunk or after cached blocks.
        ("0.23.0", TURBOQUANT, {"prompt": 256 + 128}, set()),
        ("0.23.0", TURBOQUANT, {"prompt": 256 + 129}, {"41726"}),
        ("0.21.0", TURBOQUANT, {"prompt": 64 + 129, "cached": 64}, {"41726"}),
        ("0.21.0", TURBOQUANT, {"prompt": 64 + 128, "cached": 64}, set()),
        ("0.23.0", (*TURBOQUANT, *EAGER), {"prompt": 1000}, set()),
        ("0.23.0", (*TURBOQUANT, "--kv-cache-dtype", "fp8"), {"prompt": 1000}, set()),
        ("0.24.0", TURBOQUANT, {"prompt": 1000}, set()),
        # 44053: without chunks, only after cached blocks.
        ("0.24.0", UNCHUNKED, {"prompt": 1000}, set()),
        ("0.32.0", UNCHUNKED, {"prompt": 64 + 129, "cached": 64}, {"44053"}),
        ("0.32.0", UNCHUNKED, {"prompt": 64 + 128, "cached": 64}, set()),
        # 42808: any request.
        ("0.21.0", (*TURBOQUANT, *DRAFTS), {}, {"42808"}),
        ("0.24.0", (*TURBOQUANT, *DRAFTS), {}, set()),
        ("0.21.0", (*TURBOQUANT, *DRAFTS, *PIECEWISE), {}, set()),
        # 41700: one branch, a prompt of more than 759 tokens.
        (BRANCH, (), {"prompt": 759}, set()),
        (BRANCH, (), {"prompt": 760}, {"41700"}),
        (BRANCH, EAGER, {"prompt": 760}, set()),
        ("0.20.1", (), {"prompt": 760}, set()),
        # 42085: an answer that fills the prompt's last block, or a CPU pool smaller than the GPU's.
        ("0.21.0", OFFLOAD, {"prompt": 90_109}, {"42085"}),
        ("0.21.0", OFFLOAD, {"prompt": 90_109, "max_tokens": 3}, set()),
        ("0.21.0", OFFLOAD, {"prompt": 90_112}, set()),
        ("0.21.0", (*OFFLOAD, "--num-gpu-blocks-override=50000"), {"prompt": 90_109}, set()),
        ("0.21.0", (*OFFLOAD, "--disable-hybrid-kv-cache-manager"), {"prompt": 90_109}, set()),
        ("0.21.0", offload(LARGE, lazy_offload=True), {"prompt": 90_109}, set()),
        ("0.22.0", OFFLOAD, {"prompt": 90_109}, set()),
        ("0.23.0", offload(SMALL_POOL), {"prompt": 90_117}, {"42085"}),
        ("0.24.0", offload(SMALL_POOL), {"prompt": 90_117}, set()),
        # 54195: min_tokens and a stop token beyond the vocabulary.
        ("0.28.0", (), {"min_tokens": 1, "stop_token_ids": (999_999,)}, {"54195"}),
        ("0.28.0", (), {"min_tokens": 1, "stop_token_ids": (5,)}, set()),
        ("0.28.0", (), {"stop_token_ids": (999_999,)}, set()),
        ("0.29.0", (), {"min_tokens": 1, "stop_token_ids": (999_999,)}, set()),
    ],
)
def test_boundaries(
    version: str, flags: tuple[str, ...], request_of: dict[str, Any], issues: set[str]
) -> None:
    assert deaths(settings(version, flags, kv_cache_tokens=145_274), **request_of) == issues


@pytest.mark.parametrize(
    ("version", "flags", "interval", "exception"),
    [
        ("0.20.2", (*TURBOQUANT, *DRAFTS), 1, "RuntimeError"),
        ("0.20.2", (*TURBOQUANT, *DRAFTS, *EAGER), 1, None),
        ("0.20.2", TURBOQUANT, 1, None),
        ("0.20.2", TURBOQUANT, 4, "NotImplementedError"),
        ("0.21.0", (*TURBOQUANT, *DRAFTS), 4, None),
        ("0.25.1", TURBOQUANT, 4, "ValueError"),
        ("0.27.0", TURBOQUANT, 4, None),
    ],
)
def test_boots_that_fail(
    version: str, flags: tuple[str, ...], interval: int, exception: str | None
) -> None:
    rule = boot_rule(settings(version, flags, full_attention_interval=interval))
    assert (rule.death.exception if rule and rule.death else None) == exception


def test_the_harness_knows_which_bugs_are_in_the_table() -> None:
    of_scenarios = {rule.issue for rule in RULES} - {
        "vllm-project/vllm#50709"
    }  # it only keeps two releases from booting
    assert of_scenarios == IMITATED


def test_every_stack_can_be_printed() -> None:
    for rule in RULES:
        if rule.death:
            assert len(traceback(rule.death.frames, rule.death.last_line)) >= 4
