from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_vllm import Exchange, FakeVllm
from vllm_repro.client.answer import Answer
from vllm_repro.client.client import Client, _lines
from vllm_repro.running.death_signs import Channel, log_sign, sign_of_answer

DEAD = {
    "error": {
        "message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}


def ask(response: httpx.Response | Exception, *, stream: bool) -> Answer:
    def handle(_: httpx.Request) -> httpx.Response:
        if isinstance(response, Exception):
            raise response
        return response

    async def run() -> Answer:
        async with Client("http://server") as client:
            client._http = httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://server")
            return await client.ask("/v1/completions", {"stream": stream})

    return asyncio.run(run())


def events(items: Iterable[object], *, done: bool = True) -> httpx.Response:
    lines = [f"data: {json.dumps(item)}\n\n" for item in items] + (["data: [DONE]\n\n"] if done else [])
    return httpx.Response(200, content="".join(lines).encode())


def chunk(text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}]}


USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}},
}


def test_a_stream_that_ends_well() -> None:
    answer = ask(events([chunk("a"), chunk("b", "length"), USAGE]), stream=True)
    assert answer.ok
    assert (answer.text, answer.finish_reason, answer.done) == ("ab", "length", True)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.cached_tokens) == (7, 3)
    assert len(answer.token_times) == 2
    assert sign_of_answer(answer) is None


def test_a_dying_stream_is_a_200_with_an_error_event_and_done() -> None:
    answer = ask(events([chunk("a"), DEAD]), stream=True)
    assert (answer.status, answer.ok, answer.done) == (200, False, True)
    sign = sign_of_answer(answer)
    assert sign is not None
    assert (sign.channel, sign.decisive) == (Channel.STREAM, True)


def test_a_plain_request_in_flight_gets_the_dead_message() -> None:
    sign = sign_of_answer(ask(httpx.Response(500, json=DEAD), stream=False))
    assert sign is not None
    assert (sign.channel, sign.decisive) == (Channel.ANSWER, True)
    assert sign.detail.startswith("HTTP 500: EngineCore encountered an issue.")


@pytest.mark.parametrize(
    ("response", "stream", "channel"),
    [
        (events([chunk("a")]), True, Channel.STREAM),  # no finish_reason, though [DONE] came
        (events([chunk("a")], done=False), True, Channel.STREAM),
        (events([USAGE | {"usage": {"prompt_tokens": 7, "completion_tokens": 0}}]), True, Channel.EMPTY),
        (events([{"error": {"message": "Internal server error"}}]), True, Channel.STREAM),
        (httpx.Response(500, json={"error": {"message": "Internal server error"}}), False, Channel.ANSWER),
        (httpx.Response(502, text="bad gateway"), False, Channel.ANSWER),
        (httpx.ReadError("reset"), False, Channel.ANSWER),
        (httpx.RemoteProtocolError("incomplete chunked read"), True, Channel.STREAM),
    ],
)
def test_what_does_not_decide_alone(response: httpx.Response | Exception, stream: bool, channel: Channel) -> None:
    answer = ask(response, stream=stream)
    assert not answer.ok
    sign = sign_of_answer(answer)
    assert sign is not None
    assert (sign.channel, sign.decisive) == (channel, False)


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refusal_is_no_sign(status: int) -> None:
    answer = ask(httpx.Response(status, json={"error": {"message": "no"}}), stream=False)
    assert answer.error == "no"
    assert sign_of_answer(answer) is None


def test_a_refusal_within_a_stream_is_the_refusal_that_it_says() -> None:
    answer = ask(events([{"error": {"message": "stop_token_ids out of range", "code": 400}}]), stream=True)
    assert (answer.status, answer.error) == (400, "stop_token_ids out of range")
    assert sign_of_answer(answer) is None


def test_log_signs_are_vllms_own_words() -> None:
    assert log_sign("(EngineCore pid=1) ERROR 11-20 [core.py:1138] EngineCore encountered a fatal error.") is not None
    found = log_sign("vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.")
    assert found is not None
    assert not found[1]
    for harmless in (
        "Traceback (most recent call last):",
        "ERROR: Exception in ASGI application",
        "INFO: Shutting down",
    ):
        assert log_sign(harmless) is None


def test_a_piece_without_text_has_its_time_and_its_token() -> None:
    """Half a letter has no text yet, and the engine has made a step."""
    pieces = [chunk(""), chunk("é", "length")]
    ids = [{"choices": [{**piece["choices"][0], "token_ids": [number]}]} for number, piece in enumerate(pieces, 7)]  # type: ignore[index]  # the pieces are dicts of this shape, as written above
    answer = ask(events([*ids, USAGE]), stream=True)
    assert (len(answer.arrivals), len(answer.token_times)) == (2, 1)
    assert answer.tokens == (7, 8)
    without = ask(events([*pieces, USAGE]), stream=True)
    assert without.tokens == ("é",)


def test_by_how_much_each_token_was_likelier_than_the_next_best() -> None:
    best = [{"top_logprobs": [{" a": -0.5, " b": -2.0}]}, {"top_logprobs": [{" c": -0.125, " d": -0.25, " e": -9.0}]}]
    pieces: list[dict[str, object]] = [{"index": 0, "text": "x", "logprobs": told} for told in best]
    answer = ask(events([{"choices": [piece]} for piece in pieces]), stream=True)
    assert answer.margins == (1.5, 0.125)
    whole = {"choices": [{**pieces[0], "finish_reason": "length"}]}
    assert ask(httpx.Response(200, json=whole), stream=False).margins == (1.5,)
    for told in (None, {}, {"top_logprobs": None}, {"top_logprobs": [{" a": -0.5}]}):
        assert ask(events([{"choices": [{"index": 0, "text": "x", "logprobs": told}]}]), stream=True).margins == ()


def test_tokens_of_an_answer_in_one_piece() -> None:
    body = {"choices": [{"text": "ab", "finish_reason": "length", "token_ids": [1, 2]}], "usage": USAGE["usage"]}
    answer = ask(httpx.Response(200, json=body), stream=False)
    assert (answer.tokens, len(answer.arrivals)) == ((1, 2), 1)


def serve(tmp_path: Path, respond: Callable[[Exchange], None]) -> FakeVllm:
    return FakeVllm(tmp_path / "log", {"/metrics": respond, "/v1/completions": respond})


def endless(exchange: Exchange) -> None:
    exchange.send_response(200)
    exchange.end_headers()
    with contextlib.suppress(OSError):
        while not exchange.fake.closed.wait(0.01):
            exchange.wfile.write(b"data: x" * 1_000)


def test_a_response_without_end_is_an_error_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(server: FakeVllm) -> None:
        async with Client(server.base_url) as client:
            with pytest.raises(httpx.ReadTimeout, match=r"within 0\.1 s"):
                await client.get("/metrics", timeout=0.1)
            monkeypatch.setattr("vllm_repro.client.client._MOST_BYTES", 100_000)
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get("/metrics", timeout=10.0)
            for stream in (True, False):
                answer = await client.ask("/v1/completions", {"stream": stream})
                assert (answer.ok, answer.error_kind) == (False, "transport")

    with serve(tmp_path, endless) as server:
        asyncio.run(run(server))


def test_a_compressed_response_is_read(tmp_path: Path) -> None:
    def compressed(exchange: Exchange) -> None:
        body = gzip.compress(b'{"data": [{"id": "m"}]}')
        exchange.send_response(200)
        exchange.send_header("Content-Encoding", "gzip")
        exchange.send_header("Content-Length", str(len(body)))
        exchange.end_headers()
        exchange.wfile.write(body)

    async def run(server: FakeVllm) -> str:
        async with Client(server.base_url) as client:
            return await client.model_name()

    with FakeVllm(tmp_path / "log", {"/v1/models": compressed}) as server:
        assert asyncio.run(run(server)) == "m"


@given(st.lists(st.binary(max_size=6)))
def test_lines_do_not_depend_on_the_pieces_that_carry_them(pieces: list[bytes]) -> None:
    async def content() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    async def run() -> list[str]:
        return [line async for line in _lines(httpx.Response(200, content=content()))]

    whole = b"".join(pieces).split(b"\n")
    expected = whole if whole[-1] else whole[:-1]
    assert asyncio.run(run()) == [line.decode("utf-8", "replace") for line in expected]
