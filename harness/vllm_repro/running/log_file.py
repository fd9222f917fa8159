"""A log file read while it grows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

__all__ = ["follow"]

_LINE_LIMIT = 65536
_MOST = 8_000_000
_BIG = 1_000_000
_TICK_S = 0.02


async def follow(path: Path) -> AsyncIterator[tuple[str, float]]:
    """Each line of `path` as it is written, with the time of that write in seconds since the epoch; never ends.

    A file that is not there yet is waited for. A progress bar's redrawings are lines. A line is cut at 65,536 bytes. Part of a line
    comes as an empty one: the file grows, and there is nothing to read yet.
    """
    offset, rest = 0, b""
    while True:
        size = _size(path) - offset
        if size > 0:
            read = asyncio.to_thread(_read, path, offset) if size > _BIG else None
            data, written = await read if read is not None else _read(path, offset)
            offset += len(data)
            *lines, rest = (rest + data).replace(b"\r", b"\n").split(b"\n")
            rest = rest[:_LINE_LIMIT]
            if not lines:
                yield "", written
            for line in lines:
                yield line[:_LINE_LIMIT].decode("utf-8", "replace"), written
        await asyncio.sleep(_TICK_S)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, offset: int) -> tuple[bytes, float]:
    try:
        with path.open("rb") as file:
            written = os.fstat(file.fileno()).st_mtime
            file.seek(offset)
            return file.read(_MOST), written
    except OSError:
        return b"", 0.0
