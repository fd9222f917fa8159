"""The outcome of one trial, and the facts of each outcome that other modules ask for. Pure.

The exit status of a server, a 200 or the word "Traceback" in a log decide nothing here: vLLM exits
0 when its engine dies.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from vllm_repro.trigger.trigger import TriggerResult
from vllm_repro_diagnosis.signature import How

NEVER_IDLE = "coming to rest"
"""`during` in the journal for a hang whose engine keeps working with no request left."""

Tone = Literal["bad", "good", "warn", "dull"]
"""A colour of the HTML page."""


class Outcome(StrEnum):
    """Outcome of one trial, such as a crash by this bug, a hang, or a clean end."""

    CRASH = "crash"  # died of this bug
    OTHER_CRASH = "other-crash"  # died of something else, or of an unknown cause
    HANG = "hang"
    WRONG_OUTPUT = "wrong-output"
    CLEAN = "clean"  # trigger crossed, engine alive at the end
    UNTRIGGERED = "untriggered"  # alive, trigger not crossed
    BOOT_FAILED = "boot-failed"  # never ready, and not by this bug
    UNSUPPORTED = "unsupported"  # cannot run with this release or on this host
    INFRA = "infra"  # trouble of the host, which says nothing about the engine
    CANCELLED = "cancelled"

    @property
    def facts(self) -> OutcomeFacts:
        """Properties of this outcome, such as whether the engine lived."""
        return _OUTCOMES[self]


@dataclass(frozen=True, kw_only=True)
class OutcomeFacts:
    """Properties of an outcome that the verdict, reports and JUnit use."""

    # State of the engine in one or two words; "-" if it died or was not tested.
    engine: str
    # Colour on the page.
    tone: Tone
    # How JUnit and pytest report an outcome that the arm does not declare.
    ci: Literal["passed", "failure", "error", "skipped"]
    # The engine lived and answered well.
    alive: bool = False
    # The engine failed in a way that is this bug only if the arm declares it.
    other_failure: bool = False
    # The trial tested the engine.
    tested: bool = True
    # The workload began.
    ran: bool = True


_OUTCOMES = {
    Outcome.CRASH: OutcomeFacts(engine="-", tone="bad", ci="failure", other_failure=True),
    Outcome.OTHER_CRASH: OutcomeFacts(engine="-", tone="bad", ci="failure", other_failure=True),
    Outcome.HANG: OutcomeFacts(engine="hung", tone="bad", ci="failure", other_failure=True),
    Outcome.WRONG_OUTPUT: OutcomeFacts(
        engine="alive", tone="bad", ci="failure", other_failure=True
    ),
    Outcome.CLEAN: OutcomeFacts(engine="alive", tone="good", ci="passed", alive=True),
    Outcome.UNTRIGGERED: OutcomeFacts(engine="alive", tone="dull", ci="skipped", alive=True),
    Outcome.BOOT_FAILED: OutcomeFacts(engine="never ready", tone="warn", ci="error", ran=False),
    Outcome.UNSUPPORTED: OutcomeFacts(
        engine="-", tone="dull", ci="skipped", tested=False, ran=False
    ),
    Outcome.INFRA: OutcomeFacts(engine="-", tone="dull", ci="error", tested=False, ran=False),
    Outcome.CANCELLED: OutcomeFacts(engine="-", tone="dull", ci="error", tested=False, ran=False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """Death of an engine: where it showed, its exception and frames, and if it is this bug."""

    # Channel that reported it first.
    detected_by: str
    # Seconds from the death to that report; None if the time of death is unknown.
    latency_s: float | None
    exception: str | None
    message: str | None
    frames: tuple[str, ...]
    # None if no cause is known.
    signature: How | None
    # All channels that reported it, in order of time.
    channels: tuple[str, ...]
    # Ranks on which it began, for a server over several nodes.
    ranks: tuple[int, ...] = ()
    # Parts of the signature that do not match, if it is near.
    differs: str = ""
    # Line number of each frame; empty in older journals.
    lines: tuple[int, ...] = ()


def is_unexplained(outcome: Outcome, death: Death | None) -> bool:
    """Return True for another crash that may be this bug: cause unknown, or near the signature.

    False for every outcome but `other-crash`: a server that was never ready is no evidence.
    """
    return outcome is Outcome.OTHER_CRASH and death is not None and death.signature is not How.OTHER


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlasted:
    """Server of a further node that kept running after the server of the first node exited."""

    rank: int
    # Seconds of observation.
    watched_s: float
    # Its log had no new line in that time.
    silent: bool
    # Seconds that stopping the servers took after that.
    ended_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrialFacts:
    """Facts of a trial that decide its outcome.

    Each text is a sentence for people; None: it did not happen.
    """

    ready: bool
    finding: TriggerResult
    death: Death | None = None
    cancelled: str | None = None
    infra: str | None = None
    unsupported: str | None = None
    hung: str | None = None
    wrong_output: str | None = None


def classify(facts: TrialFacts) -> Outcome:
    """Return the outcome of a trial.

    In this order: cancelled, trouble of the host, unsupported, a crash that matches the signature,
    a server that was never ready, another crash, a hang, a wrong answer: a dead or hanging engine
    may also give wrong answers, so the cause comes first. A trial without any of these is clean if
    the boundary was crossed, else untriggered.
    """
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
