"""Of a server over several nodes, the nodes that its death began with, by their `--node-rank`. Pure.

Every node's log tells the end of its own part. When a worker is killed only its own node says so; the others report a connection that
was closed, which names nobody. When the code itself fails, several ranks may fail of the same at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm_repro.diagnosis.diagnosis import Diagnosis
from vllm_repro.diagnosis.log_text import Line
from vllm_repro.diagnosis.signature import How, Signature, compare

__all__ = ["NodeLog", "culprits", "lost_worker"]

_GONE = re.compile(r"Worker proc VllmWorker-(\d+) died unexpectedly")


@dataclass(frozen=True)
class NodeLog:
    """What one node's log says. node: 0 for the one with the HTTP. lost: the worker whose process it saw vanish, by its rank among all
    workers, which is the node's only where each has one."""

    node: int
    diagnosis: Diagnosis
    lost: int | None = None


def lost_worker(lines: Iterable[Line]) -> int | None:
    """The rank of the first worker that a log says to have died unexpectedly; None where it says so of none."""
    for line in lines:
        if "died unexpectedly" in line.text and (found := _GONE.search(line.text)):
            return int(found[1])
    return None


def culprits(logs: Sequence[NodeLog], signature: Signature | None) -> tuple[int, ...]:
    """The nodes, in order: those that saw a worker's process vanish, else those of the signature, else those that name a cause."""
    if gone := [log.node for log in logs if log.lost is not None]:
        return tuple(sorted(gone))
    named = [log for log in logs if log.diagnosis.exception is not None]
    same = [log.node for log in named if signature and compare(signature, log.diagnosis).how is How.MATCH]
    return tuple(sorted(same or [log.node for log in named]))
