"""The measuring client: any bytes of a server become one answer, at the times of the socket."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro.client.answer import Answer
from vllm_repro.client.client import Client
from vllm_repro.client.load import LoadClient, _arrival

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
BODY: dict[str, object] = {"prompt": "p", "max_tokens": 3, "stream": True}


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str, finish: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish}])


def chunked(*pieces: bytes, end: bool = True) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in pieces) + (
        b"0\r\n\r\n" if end else b""
    )


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [
    token("a"),
    token("é"),
    token("c", "length"),
    event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3}),
    b"data: [DONE]\n\n",
]
WHOLE = STREAM + chunked(*EVENTS)


async def request(reader: asyncio.StreamReader) -> bytes:
    """Return the body of one request."""
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (
        int(line.split(b":")[1])
        for line in head.split(b"\r\n")
        if line.startswith(b"Content-Length:")
    )
    return await reader.readexactly(length)


async def served(handler: Handler, ask: Callable[[str], Awaitable[list[Answer]]]) -> list[Answer]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except asyncio.IncompleteReadError:
            pass  # the client is gone
        finally:
            writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        return await ask(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")


async def asked(url: str, count: int = 1, body: Mapping[str, object] = BODY) -> list[Answer]:
    """Return the answers to equal requests, on connections that are open before the first."""
    async with LoadClient(url) as client:
        await client.open(count)
        return [await client.ask("/v1/completions", body) for _ in range(count)]


def answers(
    handler: Handler,
    count: int = 1,
    *,
    run: Callable[..., list[Answer]] = asyncio.run,
    **fields: object,
) -> list[Answer]:
    return run(served(handler, lambda url: asked(url, count, BODY | fields)))


def sends(*pieces: bytes, close: bool | None = True) -> Handler:
    """Return a handler that writes the pieces, each in a packet of its own.

    close: None to reset the connection then, as the kernel does for a killed server.
    """

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02 if close is None else 0.002)
        if close is None:
            writer.transport.abort()
        elif not close:
            await asyncio.sleep(10)

    return handler


def timeless(answer: Answer) -> Answer:
    return replace(
        answer,
        sent=0.0,
        ended=0.0,
        written=None,
        arrivals=(0.0,) * len(answer.arrivals),
        token_times=(),
    )


def test_a_stream_is_read_as_the_other_client_reads_it() -> None:
    (ours,) = answers(sends(WHOLE, close=False))

    async def ask(url: str) -> list[Answer]:
        async with Client(url) as client:
            return [await client.ask("/v1/completions", BODY)]

    (theirs,) = asyncio.run(served(sends(WHOLE), ask))
    assert ours.ok
    assert (ours.text, ours.usage and ours.usage.completion_tokens, ours.finish_reason) == (
        "aéc",
        3,
        "length",
    )
    assert timeless(ours) == timeless(theirs)


@given(
    cuts=st.lists(st.integers(1, len(WHOLE) - 1), max_size=6, unique=True), padding=st.booleans()
)
@settings(max_examples=40, deadline=None)
def test_an_answer_does_not_depend_on_where_the_bytes_are_cut(
    cuts: list[int], padding: bool
) -> None:
    raw = (b"HTTP/1.1 100 Continue\r\n\r\n" if padding else b"") + WHOLE
    ends = [*sorted(cuts), len(raw)]
    pieces = [raw[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    (cut,) = answers(sends(*pieces, close=False))
    (whole,) = answers(sends(raw, close=False))
    assert timeless(cut) == timeless(whole)
    assert cut.ok


def test_tokens_have_the_times_of_the_socket() -> None:
    wrote: list[float] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(STREAM)
        for one in EVENTS:
            await asyncio.sleep(0.02)
            wrote.append(time.time())
            writer.write(chunked(one, end=False))
        writer.write(b"0\r\n\r\n")
        await asyncio.sleep(10)

    began = time.time()
    (answer,) = answers(handler)
    assert answer.ok
    assert began < answer.sent < wrote[0]
    # In one process the server wakes the client, so a token is never read before it was written.
    assert all(before <= after for before, after in zip(wrote, answer.arrivals, strict=False))
    assert all(after <= before for before, after in zip(wrote[1:], answer.arrivals, strict=False))
    assert answer.token_times == answer.arrivals


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_token_read_late_has_the_time_of_its_packet(
    run: Callable[..., list[Answer]],
) -> None:
    wrote: list[tuple[float, float]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(STREAM + chunked(EVENTS[0], end=False))
        await asyncio.sleep(0.05)
        for event in EVENTS[1:]:
            before = time.time()
            writer.write(chunked(event, end=False))
            wrote.append((before, time.time()))
            await asyncio.sleep(0)
            time.sleep(0.1)  # both ends share this thread: the client cannot read
            await asyncio.sleep(0.01)
        writer.write(b"0\r\n\r\n")
        await asyncio.sleep(10)

    (answer,) = answers(handler, run=run)
    assert answer.ok
    assert all(
        before - 0.001 < arrival < after + 0.05
        for (before, after), arrival in zip(wrote[:2], answer.arrivals[1:], strict=True)
    )


def test_an_arrival_is_not_read_from_clocks_far_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wall clock is 990 s ahead.

    The core is taken away for 30 ms between the first two readings, then for 50 us.
    """
    ticks = iter([10.0, 10.03, 10.03, 10.03005])
    walls = iter([1000.0, 1000.03002])
    monkeypatch.setattr("vllm_repro.client.load.time.perf_counter", lambda: next(ticks))
    monkeypatch.setattr("vllm_repro.client.load.time.time", lambda: next(walls))
    stamp = struct.pack("@ll", 999, 900_000_000)  # 9.9 on the other clock
    arrival = _arrival([(socket.SOL_SOCKET, 35, stamp)])
    assert arrival is not None
    assert 9.9 <= arrival <= 9.9001


def test_late_writes_and_missing_stamps_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late(socket.socket):
        def send(self, *given: Any) -> int:
            time.sleep(0.1)  # the kernel takes the core away between the stamp and the write
            return super().send(*given)

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await request(reader)
            writer.write(WHOLE)

    with monkeypatch.context() as patched:
        patched.setattr("vllm_repro.client.load.socket.socket", Late)
        late = answers(handler, 5)
    assert all(one.ok for one in late)
    # The kernel begins to stamp some time after the first socket asks for it.
    stamped = [one for one in late if one.written is not None]
    assert stamped
    assert all(0.1 <= (one.written or 0.0) - one.sent < 0.5 for one in stamped)
    monkeypatch.setattr("vllm_repro.client.load._TIMESTAMPNS", None)
    (unstamped,) = answers(handler)
    assert unstamped.ok
    assert unstamped.written is None


def test_nothing_is_left_open_if_a_connection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.create_connection
    opened: list[socket.socket] = []

    def refuses_the_fourth(*target: Any) -> socket.socket:
        if len(opened) == 3:
            raise ConnectionRefusedError("refused")
        opened.append(connect(*target))
        return opened[-1]

    monkeypatch.setattr("vllm_repro.client.load.socket.create_connection", refuses_the_fourth)

    async def ask(url: str) -> list[Answer]:
        with pytest.raises(ConnectionRefusedError, match="refused"):
            async with LoadClient(url) as client:
                await client.open(8)
        return []

    asyncio.run(served(sends(), ask))
    assert [one.fileno() for one in opened] == [-1] * 3


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_request_larger_than_the_buffers_arrives_whole(
    run: Callable[..., list[Answer]],
) -> None:
    prompt = "word " * 4_000_000
    arrived: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)  # until the client's buffer is full
        arrived.append(await request(reader))
        writer.write(WHOLE)

    (answer,) = answers(handler, run=run, prompt=prompt)
    assert answer.ok
    assert json.loads(arrived[0])["prompt"] == prompt


def test_each_request_has_a_connection_that_was_open_before() -> None:
    opened: list[float] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(time.time())
        await request(reader)
        writer.write(WHOLE)
        assert await reader.read() == b"", "the client closes it, and sends nothing else"

    whole = answers(handler, 4)
    assert ([one.ok for one in whole], len(opened)) == ([True] * 4, 4)
    assert max(opened) < min(one.arrivals[0] for one in whole)


def test_a_connection_closed_before_its_request_fails() -> None:
    async def ask(url: str) -> list[Answer]:
        async with LoadClient(url) as client:
            await client.open(1)
            await asyncio.sleep(0.05)
            return [await client.ask("/v1/completions", BODY)]

    async def handler(*_: object) -> None:
        pass

    (answer,) = asyncio.run(served(handler, ask))
    assert (answer.ok, answer.status, answer.error_kind) == (False, None, "transport")


# What a dying or broken server does. Each request that it hits has failed, and keeps the tokens
# that came.

DEAD = event(error={"message": "EngineCore encountered an issue.", "code": 500})
BUSY = b'{"error": {"message": "busy"}}'
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: %d\r\n\r\n%s" % (len(BUSY), BUSY)


@pytest.mark.parametrize(
    ("raw", "close", "status", "kind", "text"),
    [
        pytest.param(STREAM + chunked(*EVENTS[:2]), False, 200, None, "aé", id="no finish_reason"),
        pytest.param(
            STREAM + chunked(EVENTS[0], DEAD, EVENTS[-1]),
            False,
            200,
            "event",
            "a",
            id="error event",
        ),
        pytest.param(
            STREAM + chunked(*EVENTS, end=False), True, 200, "transport", "aéc", id="no last chunk"
        ),
        pytest.param(
            STREAM + chunked(EVENTS[0], end=False), None, 200, "transport", "a", id="killed"
        ),
        pytest.param(REFUSAL, False, 503, "body", "", id="refusal"),
        pytest.param(b"SSH-2.0-OpenSSH\r\n", False, None, "transport", "", id="no HTTP"),
        pytest.param(b"", True, None, "transport", "", id="closed"),
    ],
)
def test_an_answer_that_is_not_whole(
    raw: bytes, close: bool | None, status: int | None, kind: str | None, text: str
) -> None:
    (answer,) = answers(sends(raw, close=close))
    assert (answer.ok, answer.status, answer.error_kind, answer.text) == (False, status, kind, text)
    assert answer.names_dead_engine is (kind == "event")
    assert len(answer.arrivals) == len(text)
    assert (answer.error == "busy") is (raw == REFUSAL)


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    assert answers(sends(head, *EVENTS))[0].ok


def test_a_server_that_is_gone() -> None:
    async def ask() -> Answer:
        async with LoadClient("http://127.0.0.1:1") as client:
            return await client.ask("/v1/completions", BODY)

    answer = asyncio.run(ask())
    assert (answer.status, answer.error_kind, answer.arrivals) == (None, "transport", ())


def test_a_stalled_stream_waits_until_it_is_cancelled() -> None:
    async def ask(url: str) -> list[Answer]:
        async with LoadClient(url) as client:
            task = asyncio.create_task(client.ask("/v1/completions", BODY))
            while not client.received:
                await asyncio.sleep(0.001)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            return [await client.ask("/v1/completions", BODY)]  # on a new connection

    stalls = iter([True, False])

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request(reader)
        writer.write(STREAM + chunked(EVENTS[0], end=False) if next(stalls) else WHOLE)
        await asyncio.sleep(10)

    (answer,) = asyncio.run(served(handler, ask))
    assert answer.ok
