"""Which arms are booted once more under `--trials auto`: those whose claim one more boot may decide. Pure.

An arm that died needs no second boot, unless others are held against it: then five, because five deaths of five bound the rate so well
that four quiet boots tell a workaround from luck, and nine boots in all is the cheapest way there. A quiet arm is booted until it has as
many quiet boots as `clean_needed` asks for. An arm that did anything else (hung, died otherwise, did not boot, fell short of the boundary)
would only do it again.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.statistics import clean_needed
from vllm_repro.verdict.verdict import ArmResult, Expected, Record, same_release

__all__ = ["MOST", "more"]

DEATHS = 5
MOST = 20
"""Boots that one arm gets at most. Where more quiet ones would be needed the claim cannot be had at a bearable price, and none is added."""


def more(
    arms: Sequence[ArmResult], record: Record | None = None, version: str | None = None, *, patched: bool = False
) -> list[str]:
    """Names of the arms to boot again; empty once everything is decided that boots can decide. The rest is as for `decide`."""
    if record is not None and same_release(record.version, version) is not patched:
        record = None  # it decides nothing: a release is not fixed by living, nor a patch of one by another's deaths
    dying = next((arm for arm in arms if arm.expected.has_bug and arm.crashed), None)
    compared = any(arm.expected is Expected.LIVES and _may_count(arm) for arm in arms)
    return [arm.name for arm in arms if not arm.outcomes or _undecided(arm, dying, record, compared=compared)]


def _may_count(arm: ArmResult) -> bool:
    return set(arm.outcomes) <= {Outcome.CLEAN}


def _undecided(arm: ArmResult, dying: ArmResult | None, record: Record | None, *, compared: bool) -> bool:
    boots = len(arm.outcomes)
    if boots >= MOST or arm.strange or not set(arm.outcomes) <= {arm.expected.sign, Outcome.CLEAN}:
        return False
    if arm.crashed:
        return arm is dying and compared and boots < DEATHS
    if arm.expected is Expected.UNTRIGGERED:
        return False
    if arm.expected is Expected.LIVES:
        if dying is None:
            return False
        # The dying arm is still being booted: what is needed if it goes on dying.
        ahead = max(0, DEATHS - dying.conclusive)
        return _short_of(clean_needed(dying.crashed + ahead, dying.conclusive + ahead), boots)
    if record is None or record.arm != arm.name:
        return boots < (clean_needed(DEATHS, DEATHS) or 0)
    return _short_of(clean_needed(record.crashed, record.boots), boots)


def _short_of(needed: int | None, boots: int) -> bool:
    return needed is not None and boots < needed <= MOST
