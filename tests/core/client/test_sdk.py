from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.fake_vllm import COMPLETION, Exchange, FakeVllm, Handler, answering, never_ending
from vllm_repro.client.answer import DEAD_MESSAGE, Answer
from vllm_repro.client.sdk import FailedRequest, SdkView, sdk_view

# Before its third version the SDK lets the HTTP library's own error through if a stream is cut.
CUT = (
    ("APIConnectionError", "Connection error.")
    if int(version("openai")[0]) > 2
    else ("ReadError", DEAD_MESSAGE)
)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the SDK's pause before a retry."""
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def view(
    tmp_path: Path,
    answer: Callable[[Exchange], None],
    failed: FailedRequest | None = None,
    within: float = 5.0,
) -> SdkView:
    path = failed.endpoint if failed else "/v1/completions"
    with FakeVllm(tmp_path / "log", {path: answer}) as server:
        return asyncio.run(sdk_view(server.base_url, "tiny", within, failed=failed))


def test_a_refused_connection() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        seen = asyncio.run(sdk_view(f"http://127.0.0.1:{unused.getsockname()[1]}", "tiny", 5.0))
    refused = ("APIConnectionError", "Connection error.", 2)
    assert (seen.error, seen.message, seen.retries) == refused


DEAD = {"error": {"message": DEAD_MESSAGE, "type": "InternalServerError", "code": 500}}
MALFORMED: tuple[object, ...] = ({}, {"choices": []}, "[]", "not JSON", "null")
LONG = {"error": {"message": "x" * 100_000}}


@pytest.mark.parametrize(
    ("answer", "within", "error", "retries", "text", "shown"),
    [
        (answering(200, COMPLETION), 5.0, "^None$", 0, "x", "^$"),
        (answering(500, DEAD), 5.0, "^InternalServerError$", 2, None, re.escape(DEAD_MESSAGE)),
        (Exchange.stall, 0.05, "^APITimeoutError$", 2, None, ""),
        (answering(400, LONG), 5.0, "^BadRequestError$", 0, None, "^.{2000}$"),
        (never_ending, 5.0, "^APIConnectionError$", 2, None, ""),
        # A malformed success is an error of the program.
        *((answering(200, body), 5.0, "Error", 0, None, "") for body in MALFORMED),
    ],
)
def test_what_a_program_with_the_sdk_sees(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: Handler,
    within: float,
    error: str,
    retries: int,
    text: str | None,
    shown: str,
) -> None:
    monkeypatch.setattr("vllm_repro.client.client.MOST_BYTES", 1 << 20)
    seen = view(tmp_path, answer, within=within)
    assert (seen.retries, seen.text) == (retries, text)
    assert re.search(error, f"{seen.error}")
    assert re.search(shown, seen.message)
    assert 0 < seen.seconds < 60


def failed(
    body: dict[str, object], status: int | None, kind: str, endpoint: str = "/v1/completions"
) -> FailedRequest:
    streamed = body.get("stream") is True
    answer = Answer(
        sent=0, ended=1, status=status, error=DEAD_MESSAGE, error_kind=kind, streamed=streamed
    )
    return FailedRequest(endpoint, body, answer)


@pytest.mark.parametrize(
    ("stream", "status", "kind", "error", "message", "attempts"),
    [
        (False, 500, "body", "InternalServerError", "no engine", (500, 503, 503)),
        (False, None, "transport", "InternalServerError", "no engine", (None, 503, 503)),
        # cut off in the body
        (False, 200, "transport", "InternalServerError", "no engine", (None, 503, 503)),
        (True, 500, "body", "InternalServerError", "no engine", (500, 503, 503)),
        (True, 200, "event", "APIError", DEAD_MESSAGE, (200,)),  # too late for a retry
        (True, 200, "transport", *CUT, (200,)),
    ],
)
def test_the_first_failure_is_recorded_and_the_request_retried(
    tmp_path: Path,
    stream: bool,
    status: int | None,
    kind: str,
    error: str,
    message: str,
    attempts: tuple[int | None, ...],
) -> None:
    bodies: list[object] = []

    def dying(exchange: Exchange) -> None:
        bodies.append(exchange.body)
        exchange.answer(503, {"error": {"message": "no engine"}})

    body = {"model": "tiny", "messages": [], "stop_token_ids": [1], "stream": stream}
    seen = view(tmp_path, dying, failed(body, status, kind, "/v1/chat/completions"))
    assert (seen.error, seen.attempts, seen.retries, seen.text) == (
        error,
        attempts,
        len(attempts) - 1,
        None,
    )
    assert bodies == [body] * (len(attempts) - 1)
    assert message in seen.message


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [("/v1/completions", "x"), ("/v1/chat/completions", "hi"), ("/v1/embeddings", "")],
)
def test_a_retry_that_is_answered_is_a_success(tmp_path: Path, endpoint: str, text: str) -> None:
    good = {
        "choices": [{"index": 0, "text": "x", "message": {"role": "assistant", "content": "hi"}}],
        "data": [],
    }
    request = failed({"model": "tiny"}, 500, "body", endpoint)
    seen = view(tmp_path, lambda exchange: exchange.answer(200, good), request)
    assert (seen.error, seen.attempts, seen.text) == (None, (500, 200), text)
