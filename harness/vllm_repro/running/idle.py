"""Detection of an engine that keeps working with no request left.

It reads the processor time of the EngineCore process.

An idle EngineCore uses almost no processor time. One that keeps stepping looks healthy from
outside: it answers, `/health` is 200, no counter moves. Workers are not read: with several ranks
even healthy workers poll their queue.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

_IDLE = 0.02
"""Largest share of one processor that an idle engine uses.

An idle EngineCore of 0.32.0 used none in 20 s; one that stepped beside 30 other processes on two
cores got less than a tenth.
"""

_NAME = "VLLM::EngineCor"  # the kernel keeps 15 characters of a process name


@dataclass(frozen=True)
class CpuSample:
    """Processor time of EngineCore at one moment."""

    # seconds on a monotonic clock
    at: float
    # processor seconds that EngineCore had used by then
    used: float


def is_idle(samples: Sequence[CpuSample], seconds: float) -> bool:
    """Return True if the engine used under 2 % of a processor in the last `seconds`.

    Return False if the samples are of a shorter time. samples: at least one, the oldest first.
    """
    last = samples[-1]
    before = [sample for sample in samples if last.at - sample.at >= seconds]
    return bool(before) and last.used - before[-1].used < _IDLE * (last.at - before[-1].at)


def never_idle_message(samples: Sequence[CpuSample]) -> str:
    """Return the sentence for reports on an engine that never became idle."""
    first, last = samples[0], samples[-1]
    return (
        f"EngineCore never became idle in the {last.at - first.at:.0f} s after the last request: "
        f"it used {last.used - first.used:.1f} s of processor time"
    )


def engine_cpu_seconds(pids: Iterable[int]) -> float | None:
    """Return the processor seconds of all EngineCore processes in `pids`; None without one."""
    times = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # it exited meanwhile: the watch reports that
            process = psutil.Process(pid)
            if process.name().startswith(_NAME):
                spent = process.cpu_times()
                times.append(spent.user + spent.system)
    return sum(times) if times else None
