"""Output streams of containers: the Docker SDK hides or raises their end, depending on its cause."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from vllm_repro.servers.docker_errors import ENGINE_ERRORS

__all__ = ["chunks", "close", "without_first"]


def chunks(stream: Any) -> Iterator[bytes]:
    """What comes through `stream` until it ends, for whatever reason; then it is closed."""
    try:
        with contextlib.suppress(*ENGINE_ERRORS):
            yield from stream
    finally:
        close(stream)


def without_first(count: int, stream: Any) -> Iterator[bytes]:
    """`stream` without its first `count` bytes."""
    for chunk in chunks(stream):
        if count < len(chunk):
            yield chunk[count:]
        count = max(0, count - len(chunk))


def close(stream: Any) -> None:
    """Closes the connection, which belongs to `stream` alone; any number of times."""
    # The other side may have closed it already, and the SDK then trips over what it no longer finds.
    with contextlib.suppress(AttributeError, OSError, *ENGINE_ERRORS):
        stream.close()
    # The SDK wakes the reader but keeps the descriptor, which only the response behind the stream gives back.
    response = getattr(stream, "_response", None)
    if response is not None:
        response.close()
