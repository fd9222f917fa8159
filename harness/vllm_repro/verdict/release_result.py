"""What an arm did in one release: a release lives only where every boot of it crossed the boundary and lived. Pure."""

from __future__ import annotations

from enum import StrEnum

from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import ArmResult, Result

__all__ = ["Fate", "fate"]


class Fate(StrEnum):
    """What an arm did in one release."""

    LIVES = "lives"
    DIES = "dies"
    SOMETIMES = "dies-sometimes"
    FAILS_OTHERWISE = "fails-otherwise"  # another crash, a hang, wrong output
    UNTRIGGERED = "untriggered"
    BOOT_FAILED = "boot-failed"
    UNSUPPORTED = "unsupported"
    INFRA = "infra"
    UNDECIDED = "undecided"


_ALONE = {
    Outcome.UNTRIGGERED: Fate.UNTRIGGERED,
    Outcome.BOOT_FAILED: Fate.BOOT_FAILED,
    Outcome.UNSUPPORTED: Fate.UNSUPPORTED,
    Outcome.INFRA: Fate.INFRA,
}
"""What all boots must agree on: one that did not boot and one that could not be tried say neither of the release."""


def fate(result: ArmResult, *, imitated: bool = True) -> Fate:
    """The fate that the trials of one arm support. `imitated`: see `RunReport`."""
    if result.result is Result.REPRODUCES:
        return Fate.DIES
    if result.result is Result.FLAKY:
        return Fate.SOMETIMES
    if result.result is Result.QUIET:
        return Fate.LIVES if imitated else Fate.UNDECIDED
    # A death that no log explains may be this one.
    if len(result.otherwise) > result.unexplained:
        return Fate.FAILS_OTHERWISE
    if len(set(result.outcomes)) == 1:
        return _ALONE.get(result.outcomes[0], Fate.UNDECIDED)
    return Fate.UNDECIDED
