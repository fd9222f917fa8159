"""How late the harness itself is, while it takes the times of others.

On a machine whose engine spins on every core a client may sleep through a whole answer and find all its tokens at once: the time to the
first one is then that of the last. A tick of its own shows that, and mostly prevents it, since a process that is woken by the clock finds
what the network had for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Self

__all__ = ["Lateness"]

_TICK = 0.002


class Lateness:
    """`async with Lateness() as late:`. worst: the most seconds by which a tick of two milliseconds came late. slept: the sum of all by
    which one was more than a tick late."""

    def __init__(self) -> None:
        self.worst = 0.0
        self.slept = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # by the line above
            await self._task

    async def _tick(self) -> None:
        while True:
            due = time.perf_counter() + _TICK
            await asyncio.sleep(_TICK)
            late = time.perf_counter() - due
            self.worst = max(self.worst, late)
            self.slept += late if late > _TICK else 0.0
