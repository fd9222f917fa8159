"""HTTP client for measurements: what it reports is the time of the server, not its own.

Its connections are open before a request is sent. A request begins when its bytes are written to the socket. A token arrives when the
kernel receives the packet that completes its bytes, however late this program reads them (`SO_TIMESTAMPNS`, man 7 socket). With TLS, and
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

__all__ = ["LoadClient"]

_TIMESTAMPNS = 35 if sys.platform == "linux" else None
"""The socket option that makes the kernel stamp packets, which Python does not name."""
_TIMESPEC = struct.Struct("@ll")
_BETWEEN_CLOCKS, _TRIES = 1e-4, 10
"""Seconds that may lie between two readings of clocks, and how often both are read."""
_READ = 65_536
"""Bytes of one read at most."""
_CONNECT_TIMEOUT = 10.0
"""Seconds to open a connection."""
_IDLE_S = 4.0
"""Seconds after an answer in which its connection is used again: vLLM closes one that is idle for five."""


class LoadClient:
    """Client for many requests at once to one server: `async with LoadClient(url, connections=128) as client`.

    connections: how many are opened at the start; one more is opened whenever all of them are in use. stall: seconds without a byte after
    which a request has failed; None for no limit. Raises `OSError` if the server refuses the connections.
    """

    def __init__(
        self, base_url: str, *, connections: int, api_key: str | None = None, stall: float | None = None
    ) -> None:
        url = urlsplit(base_url)
        self._host, self._prefix = url.hostname or "", url.path.rstrip("/")
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._tls else 80)
        token = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f" HTTP/1.1\r\nHost: {url.netloc.rpartition('@')[2]}\r\n{token}Accept: */*\r\n"
            "Accept-Encoding: identity\r\nContent-Type: application/json\r\nContent-Length: "
        )
        self._wanted, self._stall = connections, stall
        self._free: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._epoch = time.time() - time.perf_counter()
        self._events = 0

    async def __aenter__(self) -> Self:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._wanted):
                    group.create_task(self._add())
        except BaseException as error:
            await self.__aexit__()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
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
            await connection.answered(self._stall)
        except (OSError, EndlessAnswerError, httptools.HttpParserError) as failure:
            received.fail("transport", f"{type(failure).__name__}: {failure}".rstrip(": "))
        finally:
            if connection is not None:
                self._busy.remove(connection)
                self._release(connection)
            self._events += received.events
        if connection is None:
            return received.answer(sent, self.now())
        written = None if connection.written is None else self._epoch + connection.written
        return received.answer(sent, self._epoch + connection.last, written)

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

    async def _add(self) -> None:
        self._free.append(await self._open())

    async def _open(self) -> _Connection:
        connection = _Connection()
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                sock = await self._connected()
                if self._tls is None:
                    connection.read_from(sock)
                else:
                    loop, name = asyncio.get_running_loop(), self._host
                    await loop.create_connection(lambda: connection, sock=sock, ssl=self._tls, server_hostname=name)
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {_CONNECT_TIMEOUT:g} s") from error
        return connection

    async def _connected(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        failure = OSError(f"{self._host} has no address")
        for family, kind, protocol, _, address in await loop.getaddrinfo(
            self._host, self._port, type=socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind, protocol)
            try:
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
            except OSError as error:
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
            else:
                return sock
        raise failure

    def _release(self, connection: _Connection) -> None:
        if connection.reusable:
            self._free.append(connection)
        else:
            connection.close()


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection with at most one request in flight. Times are by `time.perf_counter`.

    last: when its last bytes came; 0 before. written: by when the request was written, None once something came without a stamp.
    It reads its socket itself, for the kernel's times. With TLS it is the protocol of a transport instead.
    """

    def __init__(self) -> None:
        self.last = 0.0
        self.written: float | None = None
        self._open = True
        self._socket: socket.socket | None = None
        self._transport: asyncio.Transport | None = None
        self._unsent = b""
        self._received: Received | None = None
        self._done: asyncio.Future[None] | None = None

    @property
    def reusable(self) -> bool:
        """Return True if the connection is open and no answer is awaited."""
        return self._open and self._done is None

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
        self.written = None
        self.last = sent = time.perf_counter()
        if self._socket is not None:
            written = 0
            with contextlib.suppress(BlockingIOError):
                written = self._socket.send(request)
            self._unsent = request[written:]
            self.written = None if self._unsent else time.perf_counter()
        elif self._transport is not None:
            self._transport.write(request)
        return sent

    async def answered(self, stall: float | None) -> None:
        """Wait for the end of the answer. Raises `ConnectionError` if the connection closes first, and what reading it raised.

        Raises `TimeoutError` after `stall` seconds without a byte.
        """
        assert self._done is not None
        if self._socket is not None and self._unsent:
            with contextlib.suppress(OSError):  # the reader meets the closed connection, too
                await asyncio.get_running_loop().sock_sendall(self._socket, self._unsent)
        while stall is not None and not self._done.done():
            silent = time.perf_counter() - self.last
            if silent >= stall:
                self._end(TimeoutError(f"no byte came for {stall:g} s"))
            await asyncio.wait([self._done], timeout=stall - silent)
        await self._done
        self._done = None

    def close(self) -> None:
        """Close the connection, whatever is in flight."""
        self._open = False
        self._received = None
        if self._transport is not None:
            self._transport.abort()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def read_from(self, sock: socket.socket) -> None:
        """Take over a connected socket."""
        self._socket = sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _TIMESTAMPNS is not None:
            sock.setsockopt(socket.SOL_SOCKET, _TIMESTAMPNS, 1)
        asyncio.get_running_loop().add_reader(sock, self._read)

    def _read(self) -> None:
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
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not derive from it

    def data_received(self, data: bytes) -> None:
        self._feed(data, None)

    def _feed(self, data: bytes, arrival: float | None) -> None:
        now = time.perf_counter()
        if arrival is None:
            self.written = None
        # whatever a change of the system's clock makes of an arrival
        self.last = min(now, max(self.last, now if arrival is None else arrival))
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
        self.last, self.written = time.perf_counter(), None
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


def _arrival(notes: list[tuple[int, int, bytes]]) -> float | None:
    """Return when the kernel received what was read, by its note and on the clock of `time.perf_counter`; None without one."""
    for level, kind, raw in notes:
        if level == socket.SOL_SOCKET and kind == _TIMESTAMPNS:
            seconds, nanoseconds = _TIMESPEC.unpack_from(raw)
            for _ in range(_TRIES):
                before, now, after = time.perf_counter(), time.time(), time.perf_counter()
                if after - before < _BETWEEN_CLOCKS:  # else the core was taken away between the two clocks
                    # By the later reading: a token must not arrive before it was sent.
                    return float(after - (now - seconds - nanoseconds * 1e-9))
    return None
