"""What a run is to do with an engine that has lived through its workload, as the command line says it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Wishes"]


@dataclass(frozen=True)
class Wishes:
    """throughput: whether the scenario's loads are measured. soak: seconds of steady load, 0 for none."""

    throughput: bool = False
    soak: float = 0.0
