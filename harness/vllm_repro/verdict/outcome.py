"""The outcome of one trial: a pure function from what was seen to one of ten words.

The order matters. Trouble that was established without the request that failed (Docker, the host, an install) comes first, then what
this machine or release cannot do, then the signature, then the rest. The exit status of a server, a 200, or the word "Traceback" in a
log decide nothing here: vLLM exits 0 when its engine dies.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from vllm_repro.diagnosis.signature import How
from vllm_repro.trigger.trigger import Finding

__all__ = ["Death", "Outcome", "Outlasted", "TrialFacts", "classify"]


class Outcome(StrEnum):
    CRASH = "crash"  # died, and of this bug
    OTHER_CRASH = "other-crash"  # died of something else, or of something unknown
    HANG = "hang"
    WRONG_OUTPUT = "wrong-output"
    CLEAN = "clean"  # trigger crossed, engine alive at the end
    UNTRIGGERED = "untriggered"  # alive, but nothing was proved
    BOOT_FAILED = "boot-failed"
    UNSUPPORTED = "unsupported"
    INFRA = "infra"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Death:
    """How a death was seen and what it was.

    detected_by: the channel whose sign came first. latency_s: from the engine's death to that sign, in seconds; None where the
    moment of death cannot be told. channels: all that saw it, in order of time. signature: None where nothing names a cause. ranks: of a
    server over several nodes, those that it began with.
    """

    detected_by: str
    latency_s: float | None
    exception: str | None
    message: str | None
    frames: tuple[str, ...]
    signature: How | None
    channels: tuple[str, ...]
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outlasted:
    """A further node's server that stayed when the first one was gone. Times in seconds.

    watched_s: how long after it was still there. silent: whether its log had no new line in that time. ended_s: what it took to end it.
    """

    rank: int
    watched_s: float
    silent: bool
    ended_s: float = 0.0


@dataclass(frozen=True)
class TrialFacts:
    """All that the outcome depends on. Texts are sentences for people; None means that it was not so."""

    ready: bool
    finding: Finding
    death: Death | None = None
    cancelled: str | None = None
    infra: str | None = None
    unsupported: str | None = None
    hung: str | None = None
    wrong_output: str | None = None


def classify(facts: TrialFacts) -> Outcome:
    """One of the ten words for `facts`."""
    if facts.cancelled is not None:
        return Outcome.CANCELLED
    if facts.infra is not None:
        return Outcome.INFRA
    if facts.unsupported is not None:
        return Outcome.UNSUPPORTED
    if facts.death is not None and facts.death.signature is How.MATCH:
        return Outcome.CRASH
    if not facts.ready:
        return Outcome.BOOT_FAILED
    if facts.death is not None:
        return Outcome.OTHER_CRASH
    if facts.hung is not None:
        return Outcome.HANG
    if facts.wrong_output is not None:
        return Outcome.WRONG_OUTPUT
    return Outcome.CLEAN if facts.finding.crossed else Outcome.UNTRIGGERED
