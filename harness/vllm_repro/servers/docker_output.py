"""What a container prints: two streams into one file, line by line, and the ends of streams.

The engine sends standard output and standard error as they come, so that a chunk of one may stand in the middle
of a line of the other. Log lines are evidence here, so they are put together again before they are written.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, BinaryIO

from vllm_repro.servers.docker_errors import ENGINE_ERRORS

__all__ = ["STDERR", "STDOUT", "WholeLines", "chunks", "close", "demuxed", "without_first"]

STDOUT, STDERR = 0, 1


class WholeLines:
    """Writes both streams to `file`, from any thread. What has no end of line yet waits for it, or for `close`.

    received: bytes of each stream that came so far, written or waiting.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._waiting = [b"", b""]
        self._lock = threading.Lock()
        self.received = [0, 0]

    def write(self, stream: int, chunk: bytes) -> None:
        with self._lock:
            self.received[stream] += len(chunk)
            data = self._waiting[stream] + chunk
            # A progress bar ends its lines with a carriage return alone.
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            self._waiting[stream] = data[end:]
            if end:
                self._file.write(data[:end])

    def close(self) -> None:
        with self._lock, self._file as file:
            for rest in self._waiting:
                file.write(rest)
            self._waiting = [b"", b""]


def demuxed(stream: Any) -> Iterator[tuple[int, bytes]]:
    """(STDOUT or STDERR, bytes) of a stream that was attached with `demux`, until it ends."""
    for out, err in chunks(stream):
        if out:
            yield STDOUT, out
        if err:
            yield STDERR, err


def chunks(stream: Any) -> Iterator[Any]:
    """What comes through `stream` until it ends, for whatever reason; then it is closed."""
    try:
        with contextlib.suppress(*ENGINE_ERRORS):  # one of the reasons
            yield from stream
    finally:
        close(stream)


def without_first(count: int, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """`pieces` without their first `count` bytes."""
    for piece in pieces:
        if count < len(piece):
            yield piece[count:]
        count = max(0, count - len(piece))


def close(stream: Any) -> None:
    """Closes the connection, which belongs to `stream` alone; any number of times."""
    # The other side may have closed it already, and the SDK then trips over what it no longer finds.
    with contextlib.suppress(AttributeError, OSError, *ENGINE_ERRORS):
        stream.close()
    # The SDK wakes the reader but keeps the descriptor, which only the response behind the stream gives back.
    response = getattr(stream, "_response", None)
    if response is not None:
        response.close()
