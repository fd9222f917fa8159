"""Which other issues may already be about what a run saw. Pure.

Known are those that the scenario names, and the scenarios whose signature the death has. Whether an issue is open today is not looked
up: one whose scenario is declared good for the release at hand is left out, and the others are for a person to look at.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_repro.diagnosis.diagnosis import Diagnosis, Phase
from vllm_repro.diagnosis.tracebacks import Frame
from vllm_repro.report.model import RunReport, TrialReport
from vllm_repro.scenario.matching import matches, twins
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.verdict.verdict import Standing

__all__ = ["duplicates"]


def duplicates(report: RunReport, scenarios: Sequence[Scenario]) -> list[str]:
    """Issues, `owner/repository#number`: first those whose signature a death of this run has, then those that the scenario names."""
    if not report.failures:
        return []  # what nobody saw is the same as nothing
    found: list[str] = []
    # Each death once: a thousand boots may die the same.
    for death in dict.fromkeys(_diagnosis(trial, report.version) for arm in report.arms for trial in arm.trials):
        found += [match.scenario.issue for match in matches(death, scenarios) if match.scenario.id != report.scenario]
    own = next((scenario for scenario in scenarios if scenario.id == report.scenario), None)
    if own is not None:
        found += [twin.issue for twin in twins(own, scenarios)]
    found += [*report.related, *(own.related if own is not None else ())]
    settled = {one.issue for one in scenarios if not one.filed or one.status.standing(report.version) is Standing.GOOD}
    return [issue for issue in dict.fromkeys(found) if issue != report.issue and issue not in settled]


def _diagnosis(trial: TrialReport, version: str | None) -> Diagnosis:
    death = trial.death
    if death is None:
        return Diagnosis(
            died=False,
            phase=None,
            exception=None,
            message=None,
            frames=(),
            wrapped=False,
            vllm_version=version,
            why="",
        )
    frames = tuple(Frame(*frame.rpartition(":")[::2]) for frame in death.frames)
    phase = Phase(trial.phase) if trial.phase in set(Phase) else None
    return Diagnosis(
        died=True,
        phase=phase,
        exception=death.exception,
        message=death.message,
        frames=frames,
        wrapped=False,
        vllm_version=version,
        why="",
    )
