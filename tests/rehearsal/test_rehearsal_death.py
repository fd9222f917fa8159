"""How the engine dies: where, in which words, and what is left."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import httpx
import pytest
from tests.rehearsal.rehearsal_process import (
    DEAD,
    DEAD_BODY,
    DEAD_EVENT,
    TINY,
    TINY_FLAGS,
    Running,
    Start,
    in_order,
)

BAD_STOP = {"min_tokens": 1, "stop_token_ids": [999_999]}


def prompt(tokens: int, first: int = 300) -> list[int]:
    return [first] * tokens


def dies(server: Running, answer: httpx.Response) -> None:
    """The whole death of a server that had only this plain request."""
    assert (answer.status_code, answer.text) == (500, DEAD_BODY)
    assert server.exit_code() == 0
    assert server.health() is None


@pytest.mark.parametrize("version", ["0.21.0", "0.22.1", "0.23.0"])
def test_threshold(start: Start, version: str) -> None:
    server = start(version, *TINY_FLAGS).ready()
    for tokens in (20, 256, 384):
        assert server.complete(prompt(tokens, 300 + tokens)).status_code == 200
    dies(server, server.complete(prompt(385, 299)))
    assert "requires 0.06 MB, current size is 0.03 MB." in server.log


@pytest.mark.parametrize(
    ("version", "flags"),
    [
        ("0.20.2", ()),
        ("0.24.0", ()),
        ("0.32.0", ()),
        ("0.23.0", ("--enforce-eager",)),
        ("0.23.0", ("-cc.cudagraph_mode=none",)),
        ("0.23.0", ("--compilation-config", '{"cudagraph_mode":"NONE"}')),
    ],
)
def test_who_lives(start: Start, version: str, flags: tuple[str, ...]) -> None:
    server = start(version, *TINY_FLAGS, *flags).ready()
    for tokens in (20, 256, 384, 385, 700, 2000, 4000):
        assert server.complete(prompt(tokens, 300 + tokens % 7)).status_code == 200
    assert server.health() == 200


def test_bigger_chunks_do_not_cross(start: Start) -> None:
    flags = (*TINY_FLAGS, "--max-num-batched-tokens", "4096")
    assert start("0.23.0", *flags).ready().complete(prompt(4000)).status_code == 200


def test_a_prefix_hit_crosses_too(start: Start) -> None:
    server = start("0.21.0", *TINY_FLAGS, "--max-num-batched-tokens", "2048").ready()
    assert server.complete(prompt(256)).status_code == 200
    assert server.complete(prompt(256) + prompt(128, 400)).status_code == 200
    dies(server, server.complete(prompt(256) + prompt(129, 500)))


def test_without_prefix_cache_it_does_not(start: Start) -> None:
    flags = ("--max-num-batched-tokens", "2048", "--no-enable-prefix-caching")
    server = start("0.21.0", *TINY_FLAGS, *flags).ready()
    server.complete(prompt(256))
    assert server.complete(prompt(256) + prompt(129, 500)).status_code == 200


@pytest.mark.parametrize(("version", "line"), [("0.24.0", 786), ("0.32.0", 942)])
def test_the_hole_in_the_fix(start: Start, version: str, line: int) -> None:
    flags = ("--max-num-batched-tokens", "4096", "--no-enable-chunked-prefill")
    server = start(version, *TINY_FLAGS, *flags).ready()
    assert server.complete(prompt(256)).status_code == 200
    assert server.complete(prompt(256) + prompt(128, 400)).status_code == 200
    dies(server, server.complete(prompt(256) + prompt(129, 500)))
    assert f"'turboquant_attn.py:{line}:_continuation_prefill' requires 0.06 MB, current size is 0.03 MB" in server.log


def test_two_layers_prove_nothing(start: Start) -> None:
    server = start("0.23.0", *TINY_FLAGS, shape={**TINY, "num_hidden_layers": 2}).ready()
    assert server.complete(prompt(385)).status_code == 200
    assert "TURBOQUANT" not in server.log


def test_the_reported_numbers(start: Start) -> None:
    flags = (
        "--kv-cache-dtype", "turboquant_4bit_nc", "--max-model-len", "102400", "--enable-chunked-prefill",
        "--max-num-seqs", "2", "--max-num-batched-tokens", "4096", "--enable-prefix-caching",
    )  # fmt: skip
    server = start("0.20.2rc1.dev35+g4845aee6b", *flags, shape=None, executor="mp").ready()
    assert server.complete(prompt(4224)).status_code == 200
    dies(server, server.complete(prompt(7593, 400)))
    text = (
        "Workspace is locked but allocation from 'turboquant_attn.py:720:_continuation_prefill' requires 16.00 MB, "
        "current size is 1.02 MB. Workspace growth is not allowed after locking."
    )
    worker_error = f"[multiproc_executor.py:960] AssertionError: {text}"
    in_order(
        server.log,
        "WorkerProc hit an exception.",
        "in execute_model", "in _model_forward", "in forward", "in unified_attention_with_output", "in forward",
        "in _prefill_attention", "in _continuation_prefill", "in get_simultaneous", "in _ensure_workspace_size",
        worker_error, worker_error,
        "Dumping input data for V1 LLM engine (v0.20.2rc1.dev35+g4845aee6b) with config: ",
        "Dumping scheduler output for model execution: SchedulerOutput(scheduled_new_reqs=[], ",
        "num_computed_tokens=[4096]", "3497}, total_num_scheduled_tokens=3497",
        "Dumping scheduler stats: SchedulerStats(num_running_reqs=1",
        "EngineCore encountered a fatal error.",
        f"RuntimeError: Worker failed with error '{text}', please check the stack trace above for the root cause",
        "AsyncLLM output_handler failed.",
        f"EngineDeadError: {DEAD}",
        '"POST /v1/completions HTTP/1.1" 500 Internal Server Error',
        "Shutting down", "Waiting for application shutdown.", "Application shutdown complete.",
        "Finished server process [",
    )  # fmt: skip


def test_worker_inside_the_engine_dumps_nothing(start: Start) -> None:
    server = start("0.23.0", *TINY_FLAGS).ready()
    dies(server, server.complete(prompt(385)))
    assert "Dumping" not in server.log
    assert "WorkerProc" not in server.log
    in_order(
        server.log,
        "[core.py:1197] EngineCore encountered a fatal error.",
        "[core.py:1197] AssertionError: Workspace is locked",
        "[async_llm.py:704] AsyncLLM output_handler failed.",
        "Process EngineCore:",
        "AssertionError: Workspace is locked",
        "500 Internal Server Error",
        "Finished server process [",
    )


def test_streams_in_flight_end_with_an_error_event(start: Start) -> None:
    server = start("0.23.0", *TINY_FLAGS, env={"VLLM_REHEARSAL_STEP_MS": "10"}).ready()
    body = {"prompt": "hello", "max_tokens": 500, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as stream:
        texts = stream.iter_text()
        seen = next(texts)
        answers: list[httpx.Response] = []
        killer = threading.Thread(target=lambda: answers.append(server.complete(prompt(500))))
        killer.start()
        seen += "".join(texts)
        killer.join()
    assert stream.status_code == 200
    assert seen.endswith(DEAD_EVENT)
    assert '"finish_reason":"' not in seen
    dies(server, answers[0])
    in_order(server.log, "AsyncLLM output_handler failed.", "Error in completion stream generator.")


def test_only_streams_are_noticed_by_the_watchdog(start: Start) -> None:
    server = start("0.23.0", *TINY_FLAGS, env={"VLLM_WATCHDOG_TIME_S": "0.5"}).ready()
    answer = server.complete(prompt(385), stream=True)
    assert (answer.status_code, answer.text) == (200, DEAD_EVENT)
    assert server.exit_code() == 0
    assert '"POST /v1/completions HTTP/1.1" 200 OK' in server.log


def test_keep_alive_answers_on(start: Start) -> None:
    server = start("0.23.0", *TINY_FLAGS, env={"VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "1"}).ready()
    assert server.complete(prompt(385)).status_code == 500
    for _ in range(2):
        assert server.complete("x", stream=True).text == DEAD_BODY
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/health").content == b""
        for path in ("/v1/models", "/version", "/metrics"):
            assert server.client.get(path).status_code == 200
    server.process.terminate()
    assert server.exit_code() == 0


@pytest.mark.parametrize("executor", ["uni", "mp"])
def test_min_tokens_kills_old_releases(start: Start, executor: str) -> None:
    server = start("0.28.0", executor=executor).ready()
    assert server.complete("hello", stop_token_ids=[999_999]).status_code == 200
    assert server.complete("hello", min_tokens=1).status_code == 200
    dies(server, server.complete("hello", **BAD_STOP))
    text = "index 999999 is out of bounds for dimension 1 with size 4096"
    frames = ("in sample_tokens", "in _sample", "in apply_logits_processors", "in apply", f"IndexError: {text}")
    if executor == "mp":
        wrapped = f"RuntimeError: Worker failed with error '{text}', please check"
        in_order(server.log, "WorkerProc hit an exception.", *frames, "NewRequestData(req_id=cmpl-", wrapped)
    else:
        in_order(server.log, "[core.py:1348] EngineCore encountered a fatal error.", *frames)


def test_min_tokens_is_refused_by_new_releases(start: Start) -> None:
    server = start("0.29.0").ready()
    answer = server.complete("hello", **BAD_STOP)
    message = (
        "token_id(s) [999999] in stop_token_ids contain out-of-vocab token ids. Vocabulary size: 4096 "
        "(parameter=stop_token_ids, value=[999999])"
    )
    error = {"message": message, "type": "BadRequestError", "param": "stop_token_ids", "code": 400}
    assert (answer.status_code, answer.json()) == (400, {"error": error})
    streamed = server.complete("hello", stream=True, **BAD_STOP)
    assert (streamed.status_code, streamed.text) == (
        200, f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n",
    )  # fmt: skip
    assert server.complete("hello").status_code == 200


@pytest.mark.parametrize(
    ("version", "flags", "shape", "code", "last"),
    [
        ("0.19.1", TINY_FLAGS, TINY, 2, "argument --kv-cache-dtype: invalid choice: 'turboquant_4bit_nc'"),
        ("0.23.0", ("--disable-log-requests",), TINY, 2, "vllm: error: unrecognized arguments: --disable-log-requests"),
        ("0.20.2", TINY_FLAGS, None, 1, "NotImplementedError: TurboQuant KV cache is not supported for hybrid"),
        ("0.25.1", TINY_FLAGS, TINY, 1, "ValueError: Unknown TurboQuant cache dtype: 'auto'"),
        ("0.23.0", ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "128"), TINY, 1,
         "max_num_batched_tokens (128) is smaller than max_model_len (4096)"),
        ("0.23.0", ("--max-model-len", "9999"), TINY, 1, "max_model_len (9999) is greater than the derived"),
    ],
)  # fmt: skip
def test_refused_at_boot(
    start: Start, version: str, flags: tuple[str, ...], shape: dict[str, object] | None, code: int, last: str
) -> None:
    server = start(version, *flags, shape=shape)
    assert server.exit_code() == code
    assert last in server.log
    assert "Application startup complete" not in server.log


def test_folder_without_config(start: Start, tmp_path: Path) -> None:
    server = start("0.23.0", model=str(tmp_path), shape=None)
    assert server.exit_code() == 1
    assert f"Value error, Invalid repository ID or local directory specified: '{tmp_path}'." in server.log


def test_port_in_use(start: Start, tmp_path: Path) -> None:
    first = start("0.23.0").ready()
    second = Running(["serve", "m"], {}, tmp_path / "second.log", port=first.port)
    try:
        assert second.exit_code() == 1
        assert "OSError: [Errno 98] Address already in use" in second.log
    finally:
        second.end()
