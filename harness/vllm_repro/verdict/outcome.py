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

__all__ = [
    "NEVER_IDLE",
    "Death",
    "Outcome",
    "Outlasted",
    "Tone",
    "TrialFacts",
    "classify",
    "is_unexplained",
]

NEVER_IDLE = "coming to rest"
"""The detail of a hang whose engine keeps working with no request left: what it was doing (`during` in the journal)."""

Tone = Literal["bad", "good", "warn", "dull"]
"""A colour of the HTML page."""


class Outcome(StrEnum):
    CRASH = "crash"  # died of this bug
    OTHER_CRASH = "other-crash"  # died of something else, or of an unknown cause
    HANG = "hang"
    WRONG_OUTPUT = "wrong-output"
    CLEAN = "clean"  # trigger crossed, engine alive at the end
    UNTRIGGERED = "untriggered"  # alive, trigger not crossed
    BOOT_FAILED = "boot-failed"
    UNSUPPORTED = "unsupported"
    INFRA = "infra"
    CANCELLED = "cancelled"

    @property
    def facts(self) -> OutcomeFacts:
        return _OUTCOMES[self]


@dataclass(frozen=True, kw_only=True)
class OutcomeFacts:
    """The properties of an outcome.

    engine: the state of an engine that did not die, in one or two words. tone: its colour on the
    page. ci: how JUnit and pytest report it where it is not declared. alive: the engine lived and
    answered well. other_failure: the engine failed in a way that is this bug only if the arm
    declares it. tested: the trial tested the engine. ran: the workload began.
    """

    engine: str
    tone: Tone
    ci: Literal["passed", "failure", "error", "skipped"]
    alive: bool = False
    other_failure: bool = False
    tested: bool = True
    ran: bool = True


_OUTCOMES = {
    Outcome.CRASH: OutcomeFacts(engine="-", tone="bad", ci="failure"),
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
    """The death of an engine.

    detected_by: the channel that reported it first. latency_s: seconds from the death to that
    report; None if the moment of death is unknown. channels: all that reported it, in order of
    time. signature: None if no cause is known. differs: what of the signature does not agree, if it
    is near. ranks: the ranks on which it began, for a server over several nodes. lines: the line
    number of each frame; empty in older journals.
    """

    detected_by: str
    latency_s: float | None
    exception: str | None
    message: str | None
    frames: tuple[str, ...]
    signature: How | None
    channels: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    differs: str = ""
    lines: tuple[int, ...] = ()


def is_unexplained(outcome: Outcome, death: Death | None) -> bool:
    """Return True if the trial's death may be this bug: its cause is not known, or is near the signature.

    A trial that was cut short, or that never became ready, shows nothing about the bug.
    """
    return outcome is Outcome.OTHER_CRASH and death is not None and death.signature is not How.OTHER


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlasted:
    """A further node's server that kept running after the first node's had gone. Times in seconds.

    watched_s: how long it was watched. silent: its log had no new line in that time. ended_s: how
    long ending it took.
    """

    rank: int
    watched_s: float
    silent: bool
    ended_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TrialFacts:
    """Everything that the outcome depends on.

    The texts are sentences for people; None means that it did not happen.
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

    Trouble of the host comes first, then what the machine or the release cannot do, then the
    signature.
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
