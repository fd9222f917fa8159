from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fake_vllm import COMPLETION, Exchange, FakeVllm, never_ending
from vllm_repro.client.answer import DEAD_MESSAGE
from vllm_repro.client.sdk import SdkView, sdk_view


def view(tmp_path: Path, answer: Callable[[Exchange], None]) -> SdkView:
    with FakeVllm(tmp_path / "log", {"/v1/completions": answer}) as server:
        return asyncio.run(sdk_view(server.base_url, "tiny", 5.0))


def test_a_good_answer(tmp_path: Path) -> None:
    seen = view(tmp_path, lambda exchange: exchange.answer(200, COMPLETION))
    assert (seen.error, seen.message, seen.retries, seen.text) == (None, "", 0, "x")
    assert 0 < seen.seconds < 5


def test_a_dead_engine_is_an_internal_server_error_after_two_retries(tmp_path: Path) -> None:
    body = {"error": {"message": DEAD_MESSAGE, "type": "InternalServerError", "code": 500}}
    seen = view(tmp_path, lambda exchange: exchange.answer(500, body))
    assert (seen.error, seen.retries, seen.text) == ("InternalServerError", 2, None)
    assert DEAD_MESSAGE in seen.message


def test_a_refused_connection() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        seen = asyncio.run(sdk_view(f"http://127.0.0.1:{unused.getsockname()[1]}", "tiny", 5.0))
    assert (seen.error, seen.message, seen.retries) == ("APIConnectionError", "Connection error.", 2)


def test_a_hang_is_a_timeout(tmp_path: Path) -> None:
    with FakeVllm(tmp_path / "log", {"/v1/completions": Exchange.stall}) as server:
        seen = asyncio.run(sdk_view(server.base_url, "tiny", 0.05))
    assert (seen.error, seen.retries) == ("APITimeoutError", 2)


@pytest.mark.parametrize("body", [{}, {"choices": []}, "[]", "not JSON", "null"])
def test_a_malformed_success_is_an_error_of_the_program(tmp_path: Path, body: object) -> None:
    seen = view(tmp_path, lambda exchange: exchange.answer(200, body))
    assert seen.error is not None
    assert seen.text is None


def test_an_answer_that_never_stops_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_repro.client.client._MOST_BYTES", 1 << 20)
    seen = view(tmp_path, never_ending)
    assert (seen.error, seen.retries, seen.text) == ("APIConnectionError", 2, None)


def test_a_long_message_is_cut(tmp_path: Path) -> None:
    seen = view(tmp_path, lambda exchange: exchange.answer(400, {"error": {"message": "x" * 100_000}}))
    assert (seen.error, seen.retries, len(seen.message)) == ("BadRequestError", 0, 2_000)
