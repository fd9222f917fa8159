"""Endpoints, bodies and numbers of a living server."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import httpx
import pytest
from tests.rehearsal.rehearsal_process import TINY, TINY_FLAGS, Start

PLAIN = TINY_FLAGS[:-2]


def test_boot_takes_less_than_a_second_or_so(start: Start) -> None:
    began = time.monotonic()
    server = start("0.23.0", *PLAIN).ready()
    assert time.monotonic() - began < 10  # a bare interpreter; generous, the machine may be busy
    assert server.log.startswith("REHEARSAL engine of vllm-repro, behaving as vLLM 0.23.0")


def test_small_endpoints(start: Start) -> None:
    server = start("0.23.0", *PLAIN, "--served-model-name", "tiny").ready()
    client = server.client
    for path in ("/health", "/ping"):
        answer = client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["x-vllm-rehearsal"] == "1"
        assert answer.headers["server"] == "uvicorn"
    assert client.get("/version").text == '{"version":"0.23.0"}'
    assert client.get("/load").json() == {"server_load": 0}
    card = client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", "tiny/model", 4096)
    for path in ("/server_info", "/is_sleeping", "/tokenizer_info", "/nope"):
        answer = client.get(path)
        assert (answer.status_code, answer.text) == (404, '{"detail":"Not Found"}')
    assert client.get("/v1/completions").status_code == 405


def test_completion_body_by_release(start: Start) -> None:
    old = start("0.20.2", *PLAIN).ready().complete("hello world").json()
    new = start("0.28.0", *PLAIN).ready().complete("hello world").json()
    assert old["system_fingerprint"] is None
    assert new["system_fingerprint"].startswith("vllm-0.28.0-")
    assert old["usage"] == {
        "prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2, "prompt_tokens_details": None,
    }  # fmt: skip
    assert list(new) == [
        "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage",
        "kv_transfer_params", "ec_transfer_params", "metrics",
    ]  # fmt: skip
    assert new["choices"][0]["finish_reason"] == "length"
    assert new["id"].startswith("cmpl-")


def test_streams(start: Start) -> None:
    server = start("0.28.0", *PLAIN).ready()
    body = {
        "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 0,
    }  # fmt: skip
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[1:-1]] == [None, None, None, "length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-1])
    whole = server.client.post("/v1/chat/completions", json={**body, "stream": False}).json()
    assert whole["choices"][0]["message"]["content"] == text


def test_tokenize_agrees_with_usage(start: Start) -> None:
    server = start("0.23.0", *PLAIN).ready()
    text = "hello strange xyzzy world 12345"
    told = server.client.post("/tokenize", json={"prompt": text, "add_special_tokens": True}).json()
    assert told["count"] == len(told["tokens"]) == server.complete(text).json()["usage"]["prompt_tokens"]
    assert told["max_model_len"] == 4096
    assert told["token_strs"] is None
    back = server.client.post("/detokenize", json={"tokens": told["tokens"]}).json()
    assert back == {"prompt": text}
    messages = [{"role": "user", "content": text}]
    chat = server.client.post("/tokenize", json={"messages": messages, "add_generation_prompt": True}).json()
    bare = server.client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    used = server.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert chat["count"] == used["usage"]["prompt_tokens"] > bare["count"] > told["count"]


def test_refusals(start: Start) -> None:
    server = start("0.28.0", *PLAIN, "--served-model-name", "tiny").ready()

    def error(**body: object) -> dict[str, object]:
        answer = server.client.post("/v1/completions", json={"model": "tiny", **body})
        found = answer.json()["error"]
        assert found["code"] == answer.status_code
        assert isinstance(found, dict)
        return found

    too_long = error(prompt=[10] * 9000, max_tokens=1)
    assert too_long == {
        "message": "This model's maximum context length is 4096 tokens. However, you requested 1 output tokens and your "
        "prompt contains 9000 input tokens, for a total of 9001 tokens. Please reduce the length of the input prompt or "
        "the number of requested output tokens. (parameter=input_tokens, value=9000)",
        "type": "BadRequestError",
        "param": "input_tokens",
        "code": 400,
    }
    assert "contains at least 4089 input tokens" in str(error(prompt=" word" * 5000, max_tokens=8)["message"])
    assert error(prompt="x", max_tokens=-1)["message"] == (
        "max_tokens must be at least 1, got -1. (parameter=max_tokens, value=-1)"
    )
    assert error(prompt="x", max_tokens="many")["param"] == "body.max_tokens"
    assert error(max_tokens=1)["code"] == 400
    missing = error(model="nope", prompt="x")
    assert (missing["message"], missing["type"], missing["code"]) == (
        "The model `nope` does not exist.", "NotFoundError", 404,
    )  # fmt: skip
    assert "Traceback" not in server.log


def test_old_release_shouts_at_a_bad_request(start: Start) -> None:
    server = start("0.20.2", *PLAIN).ready()
    assert server.complete("x", max_tokens=-1).status_code == 400
    assert "ERROR:    Exception in ASGI application" in server.log
    assert "Traceback (most recent call last):" in server.log
    assert server.complete("x").status_code == 200


def test_api_key_and_names(start: Start) -> None:
    server = start("0.23.0", *PLAIN, "--api-key", "secret").ready()
    assert server.complete("x").status_code == 401
    assert server.complete("x").json() == {"error": "Unauthorized"}
    headers = {"Authorization": "Bearer secret"}
    assert server.client.get("/v1/models", headers=headers).status_code == 200
    assert server.client.get("/health").status_code == 200


def test_stops_and_seeds(start: Start) -> None:
    server = start("0.23.0", *PLAIN).ready()
    first = server.complete("hello", max_tokens=8, temperature=0, return_token_ids=True).json()["choices"][0]
    again = server.complete("hello", max_tokens=8, temperature=0).json()["choices"][0]
    assert first["text"] == again["text"]
    third = first["token_ids"][2]
    stopped = server.complete("hello", max_tokens=8, temperature=0, stop_token_ids=[third]).json()["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", third)
    later = server.complete("hello", max_tokens=8, temperature=0, stop_token_ids=[third], min_tokens=8)
    assert later.json()["usage"]["completion_tokens"] == 8
    word = first["text"].split()[1]
    cut = server.complete("hello", max_tokens=8, temperature=0, stop=[word]).json()["choices"][0]
    assert cut["stop_reason"] == word
    assert word not in cut["text"]


def test_cached_tokens_need_the_flag(start: Start) -> None:
    prompt = [300] * 100
    silent = start("0.28.0", *PLAIN).ready()
    silent.complete(prompt)
    assert silent.complete(prompt).json()["usage"]["prompt_tokens_details"] is None
    assert silent.metric("vllm:prefix_cache_queries_total") == 200
    assert silent.metric("vllm:prefix_cache_hits_total") == 96
    telling = start("0.28.0", *PLAIN, "--enable-prompt-tokens-details").ready()
    assert telling.complete(prompt).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert telling.complete(prompt).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}
    without = start("0.28.0", *PLAIN, "--enable-prompt-tokens-details", "--no-enable-prefix-caching").ready()
    without.complete(prompt)
    assert without.complete(prompt).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_metrics_count_as_vllm_does(start: Start) -> None:
    server = start("0.23.0", *PLAIN).ready()
    server.complete([300] * 700, max_tokens=3)
    assert server.metric("vllm:prompt_tokens_total") == 700
    assert server.metric("vllm:generation_tokens_total") == 3
    assert server.metric("vllm:request_success_total", finished_reason="length") == 1
    # three prefill steps of 256, 256 and 188 tokens, yet one observation: vLLM counts a prompt with its first token
    assert server.metric("vllm:iteration_tokens_total_count") == 3
    assert server.metric("vllm:iteration_tokens_total_sum") == 703
    assert server.metric("vllm:iteration_tokens_total_bucket", le="1.0") == 2
    assert server.metric("vllm:iteration_tokens_total_bucket", le="512.0") == 2
    assert server.metric("vllm:iteration_tokens_total_bucket", le="1024.0") == 3
    assert server.metric("vllm:num_requests_running", engine="0", model_name="tiny/model") == 0
    assert server.metric("vllm:cache_config_info", block_size="32", enable_prefix_caching="True") == 1
    began = server.metric("process_start_time_seconds")
    assert abs(time.time() - began) < 60
    assert server.metric("vllm:prompt_tokens_created") == began


def test_many_requests_share_the_engine(start: Start) -> None:
    server = start("0.23.0", *PLAIN, env={"VLLM_REHEARSAL_STEP_MS": "5"}).ready()
    with server.client.stream(
        "POST", "/v1/completions", json={"prompt": "a", "max_tokens": 400, "stream": True}
    ) as one:
        lines = one.iter_lines()
        next(lines)
        assert server.metric("vllm:num_requests_running") == 1
        assert server.complete("b").status_code == 200
    # the stream was left unread: its request is aborted
    server.until(lambda: server.metric("vllm:num_requests_running") == 0, "abort")
    assert server.metric("vllm:request_success_total", finished_reason="abort") == 1


def test_sigterm_ends_cleanly(start: Start) -> None:
    for version, finished in (("0.23.0", True), ("0.28.0", False)):
        server = start(version, *PLAIN).ready()
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert "Application shutdown complete." in server.log
        assert ("Finished server process" in server.log) is finished
        assert "EngineDeadError" not in server.log
    newest = start("0.32.0", *PLAIN).ready()
    newest.process.send_signal(signal.SIGTERM)
    assert newest.exit_code() == 0
    # the race that a recorded 0.32.0 lost: it looks like a death and is none
    assert "AsyncLLM output_handler failed." in newest.log


def test_sigkill_leaves_the_engine_behind(start: Start) -> None:
    server = start("0.23.0", *PLAIN).ready()
    core = int(server.log.split("(EngineCore pid=")[1].split(")")[0])
    server.process.kill()
    server.process.wait()
    assert Path(f"/proc/{core}/comm").read_text().startswith("VLLM::EngineCor")


@pytest.mark.parametrize(
    ("version", "one_line", "prefixed"), [("0.23.0", False, True), ("0.28.0", True, True), ("0.32.0", True, False)]
)
def test_boot_log_by_release(start: Start, version: str, one_line: bool, prefixed: bool) -> None:
    server = start(version, *TINY_FLAGS, shape=None, env={"VLLM_DEBUG_WORKSPACE": "1"}).ready()
    log = server.log
    expected = [
        f"version {version}",
        "non-default args: {'model_tag': 'tiny/model'",
        "Resolved architecture: Qwen3_5ForConditionalGeneration",
        "Using max model len 4096",
        "TQ hybrid: full-attention layers [3, 7, 11, 15, 19, 23, 27, 31]",
        "Chunked prefill is enabled with max_num_batched_tokens=256.",
        f"Initializing a V1 LLM engine (v{version}) with config: ",
        "Using TURBOQUANT attention backend out of potential backends: ['TURBOQUANT'].",
        "Available KV cache memory: ",
        "GPU KV cache size: ",
        "Capturing CUDA graphs (decode, FULL): 100%",
        "[WORKSPACE DEBUG] Workspace locked. Current sizes: [",
        "Graph capturing finished in ",
        "Starting vLLM server on http://127.0.0.1:",
        "Application startup complete.",
    ]
    places = [log.index(text) for text in expected]
    assert places == sorted(places)
    assert (" tokens, Maximum concurrency for 4,096 tokens" in log) is one_line
    assert ("(APIServer pid=" in log.splitlines()[-2].split("INFO:")[0]) is prefixed
    assert "\rCapturing CUDA graphs" in server._log_path.read_bytes().decode()


def test_model_folder(start: Start, tmp_path: Path) -> None:
    config = {"architectures": ["X"], "text_config": {**TINY, "hidden_size": 128}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    server = start("0.23.0", "--max-num-batched-tokens", "256", model=str(tmp_path), shape=None).ready()
    assert "Resolved architecture: X" in server.log
    assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] == 4096


def test_connection_is_reused(start: Start) -> None:
    server = start("0.23.0", *PLAIN).ready()
    with httpx.Client(base_url=str(server.client.base_url)) as client:
        for _ in range(3):
            assert client.get("/health").status_code == 200
    ports = {line.split("127.0.0.1:")[1].split(" ")[0] for line in server.log.splitlines() if '"GET /health' in line}
    assert len(ports) == 2
