"""The result of a release: what an arm did in it. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never

from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import ArmResult, Result

__all__ = ["ReleaseResult", "release_result"]


class ReleaseResult(StrEnum):
    """The result of one arm in one release."""

    LIVES = "lives"
    DIES = "dies"
    SOMETIMES = "dies-sometimes"
    FAILS_OTHERWISE = "fails-otherwise"  # another crash, a hang, wrong output
    UNTRIGGERED = "untriggered"
    BOOT_FAILED = "boot-failed"
    UNSUPPORTED = "unsupported"
    INFRA = "infra"
    UNDECIDED = "undecided"


_IF_ALL_AGREE = {outcome: ReleaseResult(outcome) for outcome in Outcome if outcome in {*map(str, ReleaseResult)}}
"""A boot that failed and one that could not run prove nothing together, so all boots must agree on these."""


def release_result(result: ArmResult, *, imitated: bool) -> ReleaseResult:
    """Return the result of a release for one arm. imitated: see `RunReport`."""
    match result.result:
        case Result.REPRODUCES:
            return ReleaseResult.DIES
        case Result.FLAKY:
            return ReleaseResult.SOMETIMES
        case Result.QUIET:
            return ReleaseResult.LIVES if imitated else ReleaseResult.UNDECIDED
        case Result.INCONCLUSIVE | Result.BLOCKED:
            if result.failed_otherwise:
                return ReleaseResult.FAILS_OTHERWISE
            if len(set(result.outcomes)) == 1:
                return _IF_ALL_AGREE.get(result.outcomes[0], ReleaseResult.UNDECIDED)
            return ReleaseResult.UNDECIDED
        case _:
            assert_never(result.result)
