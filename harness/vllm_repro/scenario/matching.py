"""Match a diagnosed crash against the known scenarios."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_repro.scenario.scenario import Scenario
from vllm_repro.verdict.verdict import Expected, Standing
from vllm_repro_diagnosis.diagnosis import Diagnosis
from vllm_repro_diagnosis.signature import How, compare, quotes

_CONNECTOR = re.compile(r'kv_connector"?: ?"(\w+)"')
_FEATURES = (_CONNECTOR, re.compile(r"--kv-cache-dtype[ =]([^\W_]+)"))
"""Flags that select a part of vLLM: KV connector, and family of the KV cache."""


@dataclass(frozen=True)
class Match:
    """A scenario that a crash matches."""

    scenario: Scenario
    # How the crash compares with its signature; not `other`.
    how: How
    # Facts that contradict an exact match.
    against: str = ""

    @property
    def lives_with(self) -> list[str]:
        """Return the changes of the command with which the engine lives: `with --enforce-eager`.

        Prefer changes with which it crosses the boundary. If there are none, return those that keep
        the same requests from crossing it.
        """
        changed = [arm for arm in self.scenario.arms if arm.edits and not arm.patches]
        living = [arm for arm in changed if arm.expected is Expected.LIVES]
        kept = [
            arm for arm in changed if arm.expected is Expected.UNTRIGGERED and arm.workload is None
        ]
        return [" and ".join(map(str, arm.edits)) for arm in living or kept]


def matches(diagnosis: Diagnosis, scenarios: Sequence[Scenario]) -> list[Match]:
    """Return the scenarios that the crash is like, exact matches first.

    Of two with the same signature only one is returned: the second if the release is good for the
    first, else the first.
    """
    if diagnosis.exception is None:
        return _quoted(diagnosis, scenarios)
    compared = [
        (one, compare(one.signature, diagnosis)) for one in scenarios if one.signature is not None
    ]
    found = [
        Match(one, it.how, it.why if it.how is How.NEAR else "")
        for one, it in compared
        if it.how is not How.OTHER
    ]
    by_id = {match.scenario.id: match for match in found}
    hidden: set[str] = set()
    for match in found:
        if first := by_id.get(match.scenario.same_death_as):
            cured = first.scenario.status.standing(diagnosis.vllm_version) is Standing.GOOD
            hidden.add(first.scenario.id if cured else match.scenario.id)
    kept = [_weighed(match, diagnosis) for match in found if match.scenario.id not in hidden]
    return sorted(kept, key=lambda match: match.how is not How.MATCH) or _quoted(
        diagnosis, scenarios
    )


def _quoted(diagnosis: Diagnosis, scenarios: Sequence[Scenario]) -> list[Match]:
    """Return the scenarios whose message a text quotes without a traceback."""
    if diagnosis.died is False:
        return []
    against = "only the message agrees"
    found = (
        one
        for one in scenarios
        if one.signature is not None and quotes(one.signature, diagnosis.prose)
    )
    return [Match(one, How.NEAR, against) for one in found if not one.same_death_as]


def _weighed(match: Match, diagnosis: Diagnosis) -> Match:
    """Return the match; at most `near` if the text contradicts the scenario."""
    scenario, version, connector = match.scenario, diagnosis.vllm_version, diagnosis.connector
    wanted = _CONNECTOR.search(scenario.command)
    against = ""
    if scenario.status.standing(version) is Standing.GOOD:
        against = f"{version} is declared good"
    elif wanted and connector is not None and connector != wanted[1]:
        against = f"its KV connector is {connector or 'none'}, not {wanted[1]}"
    return replace(match, how=How.NEAR, against=against) if against else match


def twins(scenario: Scenario, scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Return the scenarios that share this one's signature (`same_death_as`)."""
    return [other for other in scenarios if other.same_death_as == scenario.id]


def other_bugs(scenario: Scenario, scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Return the other bugs that a user can meet after an upgrade past this one.

    They are declared for the first release past this bug or a later one, and need the same KV
    connector and KV cache.
    """
    past = scenario.status.first_past
    if past is None:
        return []
    features = _features(scenario)
    others = [
        other for other in scenarios if other.id != scenario.id and other.status.reaches(past)
    ]
    return [other for other in others if (needed := _features(other)) and needed <= features]


def _features(scenario: Scenario) -> set[str]:
    return {found for feature in _FEATURES for found in feature.findall(scenario.command)}
