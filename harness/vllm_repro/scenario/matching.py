"""Which known scenarios a death from anywhere is. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_repro.diagnosis.diagnosis import Diagnosis
from vllm_repro.diagnosis.signature import How, compare
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.verdict.verdict import Standing

__all__ = ["Match", "matches", "twins"]


@dataclass(frozen=True)
class Match:
    """A scenario, and how the death compares with its signature: never `other`."""

    scenario: Scenario
    how: How


def matches(diagnosis: Diagnosis, scenarios: Sequence[Scenario]) -> list[Match]:
    """The scenarios that the death is like, exact ones first.

    Of two that share a signature only one is named: the second where the release is known to be good for the first, else the first.
    """
    if diagnosis.exception is None:
        return []
    found = [Match(one, compare(one.signature, diagnosis).how) for one in scenarios if one.signature is not None]
    found = [match for match in found if match.how is not How.OTHER]
    by_id = {match.scenario.id: match for match in found}
    hidden: set[str] = set()
    for match in found:
        if first := by_id.get(match.scenario.same_death_as):
            cured = first.scenario.status.standing(diagnosis.vllm_version) is Standing.GOOD
            hidden.add(first.scenario.id if cured else match.scenario.id)
    return sorted(
        (match for match in found if match.scenario.id not in hidden), key=lambda match: match.how is not How.MATCH
    )


def twins(scenario: Scenario, scenarios: Sequence[Scenario]) -> list[Scenario]:
    """The scenarios that share the death of this one, and are it where a release has this one fixed."""
    return [other for other in scenarios if other.same_death_as == scenario.id]
