"""HTTP client for measurements: what it reports is the time of the server, not its own.

Its connections are open before a request is sent. A request begins when its bytes are written to the socket; a token arrives when its
bytes are read from it. One read of the clock stamps all that one read of the socket returned.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import time
from collections.abc import Mapping
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from vllm_repro.client.answer import Answer
from vllm_repro.client.received import EndlessAnswerError, Received

__all__ = ["LoadClient"]

_CONNECT_TIMEOUT = 10.0
"""Seconds to open a connection."""
_IDLE_S = 4.0
"""Seconds after an answer in which its connection is used again: vLLM closes one that is idle for five."""


class LoadClient:
    """Client for many requests at once to one server: `async with LoadClient(url, connections=128) as client`.

    connections: how many are opened at the start; one more is opened whenever all of them are in use. Raises `OSError` if the server
    refuses them.
    """

    def __init__(self, base_url: str, *, connections: int, api_key: str | None = None) -> None:
        url = urlsplit(base_url)
        self._host, self._prefix = url.hostname or "", url.path.rstrip("/")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._tls else 80)
        token = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f" HTTP/1.1\r\nHost: {url.netloc.rpartition('@')[2]}\r\n{token}Accept: */*\r\n"
            "Accept-Encoding: identity\r\nContent-Type: application/json\r\nContent-Length: "
        )
        self._wanted = connections
        self._free: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._epoch = time.time() - time.perf_counter()
        self._events = 0

    async def __aenter__(self) -> Self:
        self._free += await asyncio.gather(*(self._open() for _ in range(self._wanted)))
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._free:
            connection.close()
        self._free.clear()

    @property
    def received(self) -> int:
        """Return the number of events received from all streams up to now."""
        return self._events + sum(connection.events for connection in self._busy)

    async def ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Send one request and return its answer, as `Client.ask` does. `sent` is the time of the write."""
        received = Received.of(path, body)
        raw = msgspec.json.encode(dict(body))
        request = f"POST {self._prefix}{path}{self._head}{len(raw)}\r\n\r\n".encode() + raw
        sent = self.now()
        connection = None
        try:
            connection = await self._connection()
            self._busy.add(connection)
            sent = self._epoch + connection.send(request, received, self._epoch)
            await connection.answered()
        except (OSError, EndlessAnswerError, httptools.HttpParserError) as failure:
            received.fail("transport", f"{type(failure).__name__}: {failure}".rstrip(": "))
        finally:
            if connection is not None:
                self._busy.remove(connection)
                self._release(connection)
            self._events += received.events
        return received.answer(sent, self.now() if connection is None else self._epoch + connection.last)

    def now(self) -> float:
        """Return the time on the clock of the answers: seconds since the epoch that no change of the system's clock moves."""
        return self._epoch + time.perf_counter()

    async def _connection(self) -> _Connection:
        while self._free:
            connection = self._free.pop()
            idle = time.perf_counter() - connection.last if connection.last else 0.0
            if connection.reusable and idle < _IDLE_S:
                return connection
            connection.close()
        return await self._open()

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {_CONNECT_TIMEOUT:g} s") from error
        return connection

    def _release(self, connection: _Connection) -> None:
        if connection.reusable:
            self._free.append(connection)
        else:
            connection.close()


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection with at most one request in flight. last: when its last bytes came, by `time.perf_counter`; 0 before."""

    def __init__(self) -> None:
        self.last = 0.0
        self._open = True
        self._received: Received | None = None
        self._done: asyncio.Future[None] | None = None

    @property
    def reusable(self) -> bool:
        """Return True if a request may be sent: the connection is open, and the last answer came to its end."""
        return self._open and self._done is None and not self._transport.is_closing()

    @property
    def events(self) -> int:
        """Return the events of the answer that is being received."""
        return self._received.events if self._received is not None else 0

    def send(self, request: bytes, received: Received, epoch: float) -> float:
        """Write a request and return when, by `time.perf_counter`."""
        self._parser = httptools.HttpResponseParser(self)
        self._received, self._epoch = received, epoch
        self._type, self._framed = "", False
        self._done = asyncio.get_running_loop().create_future()
        self.last = sent = time.perf_counter()
        written = 0
        if self._file is not None:
            # uvloop's own write waits for the end of the loop's turn: with 128 requests at once, a millisecond.
            with contextlib.suppress(BlockingIOError):
                written = os.write(self._file, request)
        if written < len(request):
            self._transport.write(request[written:])
        return sent

    async def answered(self) -> None:
        """Wait for the end of the answer. Raises `ConnectionError` if the connection closes first, and what reading it raised."""
        assert self._done is not None
        await self._done
        self._done = None

    def close(self) -> None:
        """Close the connection, whatever is in flight."""
        self._open = False
        self._received = None
        self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it
        encrypted = transport.get_extra_info("ssl_object") is not None
        self._file: int | None = None if encrypted else transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        self.last = time.perf_counter()
        if self._received is None:
            self.close()  # bytes that no request asked for
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # The parser wraps what its callbacks raise.
            self._end(error.__context__ if isinstance(error.__context__, EndlessAnswerError) else error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open = False
        received = self._received
        if received is None:
            return
        self.last = time.perf_counter()
        if exc is None and received.status is not None and not self._framed:
            self.on_message_complete()  # its end is the end of the connection
        else:
            self._end(
                exc if isinstance(exc, OSError) else ConnectionError("the server closed the connection before the end")
            )

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-type":
                self._type = value.decode("latin-1").lower()
            case b"content-length" | b"transfer-encoding":
                self._framed = True

    def on_headers_complete(self) -> None:
        if self._received is not None and (status := self._parser.get_status_code()) >= 200:
            self._received.begin(status, self._type)

    def on_body(self, piece: bytes) -> None:
        if self._received is not None:
            self._received.feed(piece, self._epoch + self.last)

    def on_message_complete(self) -> None:
        if self._received is not None and self._received.status is not None:
            self._open = self._open and self._parser.should_keep_alive()
            self._received.end(self._epoch + self.last)
            self._end(None)

    def _end(self, error: BaseException | None) -> None:
        self._received = None
        if error is not None:
            self._open = False
        if self._done is not None and not self._done.done():
            if error is None:
                self._done.set_result(None)
            else:
                self._done.set_exception(error)
