"""HTTP client for measurements: it reports the server's time, not the client's.

Its connections are open before a request is sent; each carries one request, which begins when its
bytes are written to the socket. A token arrives when the kernel receives the packet that completes
its bytes, however late this program reads them (`SO_TIMESTAMPNS`, man 7 socket). With TLS, and
outside Linux, it arrives when it is read. All bytes of one read have one time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any, Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from vllm_repro.client.answer import Answer
from vllm_repro.client.received import EndlessAnswerError, Received

_TIMESTAMPNS = 35 if sys.platform == "linux" else None
"""The socket option that makes the kernel stamp packets, which Python does not name."""
_TIMESPEC = struct.Struct("@ll")
_BETWEEN_CLOCKS, _TRIES = 1e-4, 10
"""Seconds that may lie between two readings of clocks, and how often both are read."""
_READ = 65_536
"""Bytes of one read at most."""
_CONNECT_TIMEOUT = 10.0
"""Seconds to open a connection."""


class LoadClient:
    """Client that sends the requests of a load at once: `async with LoadClient(url) as client`."""

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        url = urlsplit(base_url)
        self._host, self._prefix = url.hostname or "", url.path.rstrip("/")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._tls else 80)
        token = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f" HTTP/1.1\r\nHost: {url.netloc.rpartition('@')[2]}\r\n{token}Accept: */*\r\n"
            "Accept-Encoding: identity\r\nContent-Type: application/json\r\nContent-Length: "
        )
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._epoch = time.time() - time.perf_counter()
        self._events = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().close()

    @property
    def received(self) -> int:
        """Return the number of events received from all streams so far."""
        return self._events + sum(connection.received.events for connection in self._busy)

    async def open(self, connections: int) -> None:
        """Open that many connections, one for each of the next requests.

        Raises `OSError` if the server refuses one.
        """
        for _ in range(connections):
            self._idle.append(await self._connect())

    async def ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Send one request and return its answer, as `Client.ask` does.

        Use up a connection of `open`; if none is left, connect first. In the answer, `sent` is the
        time of the write and `ended` that of the last bytes.
        """
        received = Received.of(path, body)
        raw = msgspec.json.encode(dict(body))
        request = f"POST {self._prefix}{path}{self._head}{len(raw)}\r\n\r\n".encode() + raw
        sent = self.now()
        connection = None
        try:
            connection = self._idle.pop() if self._idle else await self._connect()
            self._busy.add(connection)
            sent = self._epoch + connection.send(request, received, self._epoch)
            await connection.answered()
        except (OSError, EndlessAnswerError, httptools.HttpParserError) as failure:
            received.fail("transport", f"{type(failure).__name__}: {failure}".rstrip(": "))
        finally:
            if connection is not None:
                self._busy.remove(connection)
                connection.close()
            self._events += received.events
        if connection is None:
            return received.answer(sent, self.now())
        written = None if connection.written is None else self._epoch + connection.written
        return received.answer(sent, self._epoch + connection.last, written)

    def now(self) -> float:
        """Return the time in epoch seconds on the clock of the answers.

        A change of the system's clock does not move it.
        """
        return self._epoch + time.perf_counter()

    async def _connect(self) -> _Connection:
        """Return a new connection. Raises `OSError` if the server refuses it, or after 10 s."""
        connection, address = _Connection(), (self._host, self._port)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                if self._tls is None:  # only a socket of ours tells the kernel's times
                    connect = asyncio.to_thread(socket.create_connection, address, _CONNECT_TIMEOUT)
                    connection.read_from(await connect)
                else:
                    loop = asyncio.get_running_loop()
                    await loop.create_connection(lambda: connection, *address, ssl=self._tls)
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {_CONNECT_TIMEOUT:g} s") from error
        return connection


class _Connection(asyncio.Protocol):
    """HTTP/1.1 connection for one request. Times are by `time.perf_counter`.

    It reads its socket itself, for the kernel's times. With TLS it is the protocol of a transport.
    """

    def __init__(self) -> None:
        # when the last bytes came
        self.last = 0.0
        # by when the request was written; None once something came without a stamp
        self.written: float | None = None
        self.received = Received()
        self._epoch = 0.0
        self._unsent = b""
        self._type, self._framed = "", False
        self._socket: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        # why the answer ended early; None if it is complete
        self._done: asyncio.Future[BaseException | None] = (
            asyncio.get_running_loop().create_future()
        )

    def send(self, request: bytes, received: Received, epoch: float) -> float:
        """Write the request and return when that began, by `time.perf_counter`.

        Bytes that the socket does not take at once are left to `answered`. received: takes the
        answer. epoch: time in epoch seconds at which `time.perf_counter` is 0.
        """
        self.received, self._epoch = received, epoch
        self.last = sent = time.perf_counter()
        if self._transport is not None:
            self._transport.write(request)
        elif self._socket is not None:
            written = 0
            with contextlib.suppress(BlockingIOError):
                written = self._socket.send(request)
            self._unsent = request[written:]
            self.written = None if self._unsent else time.perf_counter()
        return sent

    async def answered(self) -> None:
        """Write the rest of the request, then wait for the end of the answer.

        Raises `OSError` if the connection fails or closes first, `EndlessAnswerError` for an answer
        that is too long, and `HttpParserError` for one that is not HTTP.
        """
        if self._socket is not None and self._unsent:
            with contextlib.suppress(OSError):  # the reader meets the closed connection, too
                await asyncio.get_running_loop().sock_sendall(self._socket, self._unsent)
        if (failure := await self._done) is not None:
            raise failure

    def close(self) -> None:
        """Close the connection, also during a request."""
        if self._transport is not None:
            self._transport.abort()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def read_from(self, sock: socket.socket) -> None:
        """Take over a connected socket and read what arrives; the kernel stamps its packets."""
        self._socket = sock
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _TIMESTAMPNS is not None:
            sock.setsockopt(socket.SOL_SOCKET, _TIMESTAMPNS, 1)
        asyncio.get_running_loop().add_reader(sock, self._read)

    def _read(self) -> None:
        """Read what arrived on the socket, with the kernel's time; the event loop calls it.

        Close the connection if the server has closed it.
        """
        assert self._socket is not None
        try:
            data, notes, _, _ = self._socket.recvmsg(_READ, 64)
        except BlockingIOError:
            return
        except OSError as error:
            self.connection_lost(error)
            self.close()
            return
        if data:
            self._feed(data, _arrival(notes))
        else:
            self.connection_lost(None)
            self.close()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport of a TLS connection; asyncio calls it."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it

    def data_received(self, data: bytes) -> None:
        """Take bytes of a TLS connection, without a kernel time; asyncio calls it."""
        self._feed(data, None)

    def _feed(self, data: bytes, arrival: float | None) -> None:
        """Parse bytes of the answer, and set `last`; after the answer's end do nothing.

        arrival: the kernel's time of the bytes; None: the present time counts.
        """
        if self._done.done():
            return
        now = time.perf_counter()
        if arrival is None:
            self.written = None  # the kernel's time of the request has no counterpart
        # a change of the system's clock may shift an arrival
        self.last = min(now, max(self.last, now if arrival is None else arrival))
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # The parser wraps what its callbacks raise.
            self._end(
                error.__context__ if isinstance(error.__context__, EndlessAnswerError) else error
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """End the answer as the connection closes: an error if it was not complete.

        An answer without a stated length is complete. asyncio calls it, and `_read`.
        """
        if self._done.done():
            return
        self.last, self.written = time.perf_counter(), None
        if exc is None and not self._framed:
            self.on_message_complete()  # its end is the end of the connection
        self._end(
            exc
            if isinstance(exc, OSError)
            else ConnectionError("the server closed the connection before the end")
        )

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note the content type, and whether the headers tell where the body ends."""
        match name.lower():
            case b"content-type":
                self._type = value.decode("latin-1").lower()
            case b"content-length" | b"transfer-encoding":
                self._framed = True

    def on_headers_complete(self) -> None:
        """Pass the status and content type to `received`; skip 1xx responses."""
        if (status := self._parser.get_status_code()) >= 200:
            self.received.begin(status, self._type)

    def on_body(self, piece: bytes) -> None:
        """Pass a piece of the body to `received`, with the time at which it arrived."""
        self.received.feed(piece, self._epoch + self.last)

    def on_message_complete(self) -> None:
        """End the answer; the parser calls it after the body's last byte."""
        if self.received.status is not None:  # not after 100 Continue
            self.received.end(self._epoch + self.last)
            self._end(None)

    def _end(self, failure: BaseException | None) -> None:
        """Let `answered` return, or raise `failure`; only the first call counts."""
        if not self._done.done():
            self._done.set_result(failure)


def _arrival(notes: list[tuple[int, int, bytes]]) -> float | None:
    """Return when the kernel received the data, on the clock of `time.perf_counter`.

    notes: the ancillary data of `recvmsg`. Return None if they hold no timestamp, or if the clocks
    could not be read together.
    """
    for level, kind, raw in notes:
        if level == socket.SOL_SOCKET and kind == _TIMESTAMPNS:
            seconds, nanoseconds = _TIMESPEC.unpack_from(raw)
            for _ in range(_TRIES):
                before, now, after = time.perf_counter(), time.time(), time.perf_counter()
                # else the kernel ran another thread between the two readings
                if after - before < _BETWEEN_CLOCKS:
                    # By the later reading: a token must not arrive before it was sent.
                    return float(after - (now - seconds - nanoseconds * 1e-9))
    return None
