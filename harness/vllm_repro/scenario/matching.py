"""Match a diagnosed crash against the known scenarios."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vllm_repro.scenario.scenario import Scenario
from vllm_repro.verdict.verdict import Expected, Standing
from vllm_repro_diagnosis.diagnosis import Diagnosis
from vllm_repro_diagnosis.engine_code import STEP
from vllm_repro_diagnosis.signature import How, compare, quotes
from vllm_repro_diagnosis.standstill import Finding, Kind, Reading

_CONNECTOR = re.compile(r'kv_connector"?: ?"(\w+)"')
_REPORTED_AGAIN = {"offloading-two-groups": ("vllm-project/vllm#50454", "0.25.1")}
"""By scenario: an open issue with the same crash, and its release, which is declared good."""
_FEATURES = (_CONNECTOR, re.compile(r"--kv-cache-dtype[ =]([^\W_]+)"))
"""Flags that select a part of vLLM: KV connector, and family of the KV cache."""
_METHOD = re.compile(r'"method"?: ?"(\w+)"')
_PARTS = re.compile(r"--(mamba|enable-prompt-embeds|scheduling-policy)")
_RELEASE = re.compile(r"\d+(?:\.\d+)+(?:\.post\d+)?")
_NAMED = re.compile(r"(?i)\b(lmcache|mooncake|nixl|p2pnccl|moriio|flexkv|hf3fs)")
"""KV connectors that a reporter names in a sentence."""
_COMMON = frozenset({"fp8", "auto", "bfloat16"})


def _url(issue: str) -> str:
    """Return the GitHub URL of an issue `owner/repository#number`."""
    return f"https://github.com/{issue.replace('#', '/issues/')}"


@dataclass(frozen=True)
class Match:
    """A scenario that a crash matches, exactly or nearly."""

    scenario: Scenario
    # How the crash compares with its signature; not `other`.
    how: How
    # Facts that contradict an exact match.
    against: str = ""
    # The release of the crash is declared good, or unknown: it may be one after the fix.
    later: bool = False

    @property
    def url(self) -> str:
        """Return the GitHub URL of the scenario's issue."""
        return _url(self.scenario.issue)

    @property
    def reported_again(self) -> str:
        """Return a phrase on the open issue with the same crash in a later release, or ""."""
        again = _REPORTED_AGAIN.get(self.scenario.id) if self.later else None
        return f"but {_url(again[0])} is open: the same crash in {again[1]}" if again else ""

    @property
    def lives_with(self) -> list[str]:
        """Return each arm's changes of the command that avoid the bug: `with --enforce-eager`."""
        return [" and ".join(map(str, arm.edits)) for arm in self.scenario.workarounds]


def matches(diagnosis: Diagnosis, scenarios: Sequence[Scenario]) -> list[Match]:
    """Return the scenarios whose crash signature a crash has, fully or nearly; exact ones first.

    If two have the same signature, one names the other as `same_death_as`: return it only if the
    release of the crash is good for that other, else return the other. Next to an exact match,
    leave out near matches whose signature has only functions that every engine step calls. If the
    crash has no exception or nothing matches, return the scenarios whose message the log quotes.
    """
    if diagnosis.exception is None:
        return _quoted(diagnosis, scenarios)
    compared = [
        (scenario, compare(scenario.signature, diagnosis))
        for scenario in scenarios
        if scenario.signature is not None
    ]
    like = [
        Match(scenario, likeness.how, likeness.why if likeness.how is How.NEAR else "")
        for scenario, likeness in compared
        if likeness.how is not How.OTHER
    ]
    by_id = {match.scenario.id: match for match in like}
    hidden: set[str] = set()
    for match in like:
        if first := by_id.get(match.scenario.same_death_as):
            cured = first.scenario.status.standing(diagnosis.vllm_version) is Standing.GOOD
            hidden.add(first.scenario.id if cured else match.scenario.id)
    exact = {match.scenario.id for match in like if match.how is How.MATCH}
    kept = [
        _weighed(match, diagnosis)
        for match in like
        if match.scenario.id not in hidden and _has_sign(match, diagnosis)
    ]
    if any(match.how is How.MATCH for match in kept):  # then a bare assertion adds nothing
        kept = [
            match for match in kept if match.how is How.MATCH or not _of_any_step(match.scenario)
        ]
    kept.sort(key=lambda match: match.scenario.id not in exact)
    return sorted(kept, key=lambda match: match.how is not How.MATCH) or _quoted(
        diagnosis, scenarios
    )


def _quoted(diagnosis: Diagnosis, scenarios: Sequence[Scenario]) -> list[Match]:
    """Return the scenarios whose crash message the log quotes in a sentence, all as `near`.

    Empty if the engine did not die. Scenarios with `same_death_as` are left out.
    """
    if diagnosis.died is False:
        return []
    against = "only the message agrees"
    quoted = (
        scenario
        for scenario in scenarios
        if scenario.signature is not None and quotes(scenario.signature, diagnosis.prose)
    )
    return [Match(scenario, How.NEAR, against) for scenario in quoted if not scenario.same_death_as]


def _weighed(match: Match, diagnosis: Diagnosis) -> Match:
    """Return the match, lowered to `near` if something contradicts it or too little shows it.

    Also set `later`: the release is declared good, or is unknown.
    """
    version = diagnosis.vllm_version
    good = match.scenario.status.standing(version) is Standing.GOOD
    match = replace(match, later=good or version is None)
    against = _contradiction(match.scenario, diagnosis) or _missing(match.scenario, diagnosis)
    return replace(match, how=How.NEAR, against=against) if against else match


def _contradiction(scenario: Scenario, diagnosis: Diagnosis) -> str:
    """Return a phrase on what contradicts a match, or "": release, KV connector, speculation."""
    version, connector = diagnosis.vllm_version, diagnosis.connector
    standing, declared = scenario.status.standing(version), _CONNECTOR.search(scenario.command)
    if standing is Standing.GOOD:
        return f"{version} is declared good"
    if standing is Standing.UNKNOWN and _RELEASE.fullmatch(version or ""):
        return f"{version} is not among its releases, {scenario.status.bad}"
    if declared and connector is None:
        named = {name.lower() for name in _NAMED.findall(diagnosis.prose)}
        if named and not any(name in declared[1].lower() for name in named):
            connector = " and ".join(sorted(named))
    if declared and connector is not None and connector != declared[1]:
        return f"its KV connector is {connector or 'none'}, not {declared[1]}"
    if _METHOD.search(scenario.command) and "speculative_config=None" in diagnosis.config:
        return "it did not use speculative decoding"
    return ""


def _missing(scenario: Scenario, diagnosis: Diagnosis) -> str:
    """Return a sentence naming the scenario's parts of vLLM that the log does not show, or "".

    It is "" unless the signature has only functions that every engine step calls, and no message.
    """
    parts = _parts_of(diagnosis)
    missing = sorted(word for word in _words(scenario) if _squeezed(word) not in parts)
    words = " and ".join(missing) if _of_any_step(scenario) else ""
    return f"many bugs end like this, and the text does not show {words}" if words else ""


def _has_sign(match: Match, diagnosis: Diagnosis) -> bool:
    """Return True if crash and scenario have more in common than names of functions.

    For example the message, or a part of vLLM. Also True for an exact match, unless its signature
    has only functions that every engine step calls.
    """
    scenario, last = match.scenario, diagnosis.frames[-1:]
    if scenario.signature is not None and quotes(scenario.signature, diagnosis.message or ""):
        return True
    any_step, words = _of_any_step(scenario), _words(scenario)
    parts = _parts_of(diagnosis)
    shown = any(_squeezed(word) in parts for word in words) if words else not any_step
    if match.how is not How.MATCH or not any_step:
        return shown or match.how is How.MATCH
    # A configuration without its part of vLLM is another bug's.
    echoed = last and last[0].source and not _contradiction(scenario, diagnosis)
    return bool(echoed and (shown or not diagnosis.config))


def _of_any_step(scenario: Scenario) -> bool:
    """Return True if the signature has no message, and only functions that every step calls."""
    signature = scenario.signature
    return signature is not None and not signature.message and STEP.issuperset(signature.frames)


def _words(scenario: Scenario) -> set[str]:
    """Return the words in the scenario's command that name parts of vLLM.

    They are the KV connector, the KV cache's type, the speculative method, and flags such as
    `mamba`.
    """
    features = (*_FEATURES, _METHOD, _PARTS)
    return {word for each in features for word in each.findall(scenario.command)} - _COMMON


def _parts_of(diagnosis: Diagnosis) -> str:
    """Return the log's text that may name parts of vLLM: configuration, files, message, prose.

    In the form of `_squeezed`, to search for words.
    """
    files = " ".join(frame.file for frame in diagnosis.frames)
    parts = (diagnosis.connector, diagnosis.config, diagnosis.prose, diagnosis.message, files)
    return _squeezed(" ".join(filter(None, parts)))


def _squeezed(text: str) -> str:
    """Return `text` in lower case without `_` and `-`, so that file and class names compare."""
    return text.lower().replace("_", "").replace("-", "")


_SETTING = re.compile(r'"(kv_\w+|lazy_offload)": ?"?(\w+)')
"""Settings that bring a scheduler to a standstill: connector, role, policy after a failed load."""


def standstills(finding: Finding, reading: Reading, scenarios: Sequence[Scenario]) -> list[Match]:
    """Return the scenarios whose bug may hang a live server, those with most in common first.

    The server's command has all KV-connector settings of the scenario; if the scenario has none,
    the server hangs in the file of its defect. The release must not be declared good. All are
    `near`. Empty if the server does not hang in the scheduler. finding: where it hangs. reading:
    its command and release.
    """
    expected = Expected.HANGS if reading.open else Expected.SPINS
    settings = set(_SETTING.findall(reading.command))
    files = " ".join(finding.folded)

    def alike(scenario: Scenario) -> int:
        """Return how much of a scenario's settings and code the hang has; 0 if it is no match."""
        needed = set(_SETTING.findall(scenario.command))
        defect = scenario.defect.file if scenario.defect else "scheduler.py"
        in_code = defect in files and not defect.endswith("/scheduler.py")
        return len(needed) + 9 * in_code if needed <= settings and (needed or in_code) else 0

    standing = [
        scenario
        for scenario in scenarios
        if finding.kind is Kind.SCHEDULER
        and any(arm.expected is expected for arm in scenario.arms)
        and scenario.status.standing(reading.version or None) is not Standing.GOOD
        and alike(scenario)
    ]
    return [Match(scenario, How.NEAR) for scenario in sorted(standing, key=alike, reverse=True)]


def twins(scenario: Scenario, scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Return the scenarios whose `same_death_as` names this one: they share its signature."""
    return [other for other in scenarios if other.same_death_as == scenario.id]


def other_bugs(scenario: Scenario, scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Return the other bugs that a user can meet after an upgrade past this one.

    Each is declared bad in the first release past this bug, or in a later one. Its command selects
    a KV connector or a KV-cache type, and none that this bug's command does not select. Empty if no
    release is past this bug.
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
    """Return the KV connector and the KV-cache family that a scenario's command selects."""
    return {name for feature in _FEATURES for name in feature.findall(scenario.command)}
