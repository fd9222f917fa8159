"""Log of a server, read while it grows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

_TICK = 0.02
"""Seconds between two looks at the file."""
_LONGEST_LINE = 65_536
"""Bytes of a line that are kept."""
_MOST_BYTES = 8_000_000
"""Bytes that are read at once."""
_MOST_BYTES_HERE = 1_000_000
"""Bytes that are read in the event loop. More are read in a thread, so that nothing is delayed."""


async def follow(path: Path) -> AsyncIterator[tuple[str, float]]:
    """Yield each line of `path` as it is written, with the file's write time in epoch seconds.

    Begins with the first line of the file, and never ends.

    Waits for a file that does not exist yet. A carriage return ends a line too, as in progress
    bars. Lines are truncated at 65,536 bytes. An empty line is yielded for an incomplete one, to
    show that the file grows.
    """
    offset, rest = 0, b""
    while True:
        size = _size(path) - offset
        if size > 0:
            read = asyncio.to_thread(_read, path, offset) if size > _MOST_BYTES_HERE else None
            chunk, written = await read if read is not None else _read(path, offset)
            offset += len(chunk)
            *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            rest = rest[:_LONGEST_LINE]
            if not lines:
                yield "", written
            for line in lines:
                yield line[:_LONGEST_LINE].decode("utf-8", "replace"), written
        await asyncio.sleep(_TICK)


def _size(path: Path) -> int:
    """Return the size of a file in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, offset: int) -> tuple[bytes, float]:
    """Return up to 8 MB from `offset` on, and when the file was last written, in epoch seconds.

    Returns no bytes and 0 if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            written = os.fstat(file.fileno()).st_mtime
            file.seek(offset)
            return file.read(_MOST_BYTES), written
    except OSError:
        return b"", 0.0
