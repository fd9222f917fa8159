"""Match a diagnosed crash against the known scenarios."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_repro.diagnosis.diagnosis import Diagnosis
from vllm_repro.diagnosis.signature import How, compare, quotes
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.verdict.verdict import Expected, Standing

__all__ = ["Match", "matches", "twins"]


@dataclass(frozen=True)
class Match:
    """A scenario, and how the crash compares with its signature (not `other`). against: what contradicts an exact match."""

    scenario: Scenario
    how: How
    against: str = ""

    @property
    def lives_with(self) -> list[str]:
        """Return the changes of the command with which the engine lives: `with --enforce-eager`."""
        arms = [arm for arm in self.scenario.arms if arm.expected is Expected.LIVES and not arm.patches]
        return [" and ".join(map(str, arm.edits)) for arm in arms if arm.edits]


def matches(diagnosis: Diagnosis, scenarios: Sequence[Scenario]) -> list[Match]:
    """Return the scenarios that the crash is like, exact matches first.

    Of two with the same signature only one is returned: the second if the release is good for the first, else the first.
    """
    if diagnosis.exception is None:
        return _quoted(diagnosis, scenarios)
    compared = [(one, compare(one.signature, diagnosis)) for one in scenarios if one.signature is not None]
    found = [
        Match(one, it.how, it.why if it.how is How.NEAR else "") for one, it in compared if it.how is not How.OTHER
    ]
    by_id = {match.scenario.id: match for match in found}
    hidden: set[str] = set()
    for match in found:
        if first := by_id.get(match.scenario.same_death_as):
            cured = first.scenario.status.standing(diagnosis.vllm_version) is Standing.GOOD
            hidden.add(first.scenario.id if cured else match.scenario.id)
    kept = [_weighed(match, diagnosis) for match in found if match.scenario.id not in hidden]
    return sorted(kept, key=lambda match: match.how is not How.MATCH) or _quoted(diagnosis, scenarios)


def _quoted(diagnosis: Diagnosis, scenarios: Sequence[Scenario]) -> list[Match]:
    """Return the scenarios whose message a text quotes without a traceback."""
    if diagnosis.died is False:
        return []
    against = "only the message agrees"
    found = (one for one in scenarios if one.signature is not None and quotes(one.signature, diagnosis.prose))
    return [Match(one, How.NEAR, against) for one in found if not one.same_death_as]


def _weighed(match: Match, diagnosis: Diagnosis) -> Match:
    """Return the match, `near` at most if the text contradicts the scenario."""
    scenario, version, connector = match.scenario, diagnosis.vllm_version, diagnosis.connector
    wanted = re.search(r'kv_connector"?: ?"(\w+)"', scenario.command)
    against = ""
    if scenario.status.standing(version) is Standing.GOOD:
        against = f"{version} is declared good"
    elif wanted and connector and connector != wanted[1]:
        against = f"its KV connector is {connector}, not {wanted[1]}"
    return replace(match, how=How.NEAR, against=against) if against else match


def twins(scenario: Scenario, scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Return the scenarios that share this one's signature (`same_death_as`)."""
    return [other for other in scenarios if other.same_death_as == scenario.id]
