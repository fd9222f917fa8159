from __future__ import annotations

import asyncio
import time

from vllm_repro.running.measure import Lateness


def test_a_process_that_does_not_get_to_its_work_notices() -> None:
    async def busy(seconds: float) -> Lateness:
        async with Lateness() as late:
            await asyncio.sleep(0.02)
            time.sleep(seconds)  # blocks, as a machine does that gives the process no time
            await asyncio.sleep(0.02)
        return late

    slow = asyncio.run(busy(0.2))
    assert 0.15 < slow.worst <= slow.slept
    # The machine itself may be late, but not each time.
    assert min(asyncio.run(busy(0.0)).worst for _ in range(20)) < 0.15
