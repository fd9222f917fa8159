"""Whether an engine that has nothing to do comes to rest, told from the processor time that it uses. Pure, but for `used`.

An idle EngineCore waits for its next request and uses next to nothing. One that goes on stepping looks as well as it from outside: its
requests are answered, `/health` says 200, no counter moves. Workers are not looked at: those of several ranks poll their queue in
perfect health.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

__all__ = ["QUIET", "RESTING", "Sample", "rested", "restless", "used"]

QUIET = 5.0
"""Seconds without work after which an engine is at rest."""

RESTING = "coming to rest"
"""What an engine was doing that did not."""

_IDLE = 0.02
"""Of one processor. An idle EngineCore of 0.32.0 used none at all in 20 s. One that steps uses what it gets, and that may be little: beside
30 others on two cores it was less than a tenth."""

_NAME = "VLLM::EngineCor"  # what of its name fits into the kernel's 15 letters


@dataclass(frozen=True)
class Sample:
    """at: seconds on any clock. used: seconds of processor time that EngineCore had used by then."""

    at: float
    used: float


def rested(samples: Sequence[Sample]) -> bool:
    """Whether the last `QUIET` seconds passed without work."""
    last = samples[-1]
    before = [sample for sample in samples if last.at - sample.at >= QUIET]
    return bool(before) and last.used - before[-1].used < _IDLE * (last.at - before[-1].at)


def restless(samples: Sequence[Sample]) -> str:
    """The sentence about an engine that did not come to rest."""
    first, last = samples[0], samples[-1]
    took = last.at - first.at
    return (
        f"in the {took:.0f} s after the last request had ended EngineCore never came to rest: with nothing to do it used "
        f"{last.used - first.used:.1f} s of processor time"
    )


def used(pids: Iterable[int]) -> float | None:
    """Seconds of processor time of every EngineCore among these processes; None where there is none to be seen."""
    times = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, which is for the watcher to say
            process = psutil.Process(pid)
            if process.name().startswith(_NAME):
                spent = process.cpu_times()
                times.append(spent.user + spent.system)
    return sum(times) if times else None
