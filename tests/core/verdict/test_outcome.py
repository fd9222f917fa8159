from __future__ import annotations

from dataclasses import replace

import pytest

from vllm_repro.trigger.trigger import TriggerResult
from vllm_repro.verdict.outcome import Death, Outcome, TrialFacts, classify, is_unexplained
from vllm_repro_diagnosis.signature import How

CROSSED, NOT_CROSSED = TriggerResult(True, ("proof",)), TriggerResult(False, ("none",))
ALIVE = TrialFacts(ready=True, finding=CROSSED)


def died(signature: How | None) -> Death:
    return Death(
        detected_by="log",
        latency_s=0.01,
        exception="AssertionError",
        message="…",
        frames=(),
        signature=signature,
        channels=("log",),
    )


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        (ALIVE, Outcome.CLEAN),
        (replace(ALIVE, finding=NOT_CROSSED), Outcome.UNTRIGGERED),
        (replace(ALIVE, death=died(How.MATCH)), Outcome.CRASH),
        (replace(ALIVE, death=died(How.NEAR)), Outcome.OTHER_CRASH),
        (replace(ALIVE, death=died(None)), Outcome.OTHER_CRASH),
        (TrialFacts(ready=False, finding=NOT_CROSSED, death=died(How.MATCH)), Outcome.CRASH),
        (TrialFacts(ready=False, finding=NOT_CROSSED, death=died(How.OTHER)), Outcome.BOOT_FAILED),
        (TrialFacts(ready=False, finding=NOT_CROSSED), Outcome.BOOT_FAILED),
        (replace(ALIVE, finding=NOT_CROSSED, hung="still"), Outcome.HANG),
        (replace(ALIVE, finding=NOT_CROSSED, wrong_output="empty"), Outcome.WRONG_OUTPUT),
        (replace(ALIVE, unsupported="no GPU", death=died(How.MATCH)), Outcome.UNSUPPORTED),
        (replace(ALIVE, hung="still", wrong_output="empty"), Outcome.HANG),
        (replace(ALIVE, death=died(None), hung="still", wrong_output="empty"), Outcome.OTHER_CRASH),
        (replace(ALIVE, infra="disk full", unsupported="no GPU"), Outcome.INFRA),
        (replace(ALIVE, infra="disk full", death=died(How.MATCH)), Outcome.INFRA),
        (replace(ALIVE, cancelled="Ctrl-C", infra="disk full"), Outcome.CANCELLED),
    ],
)
def test_order_of_classification(facts: TrialFacts, outcome: Outcome) -> None:
    assert classify(facts) is outcome


def test_every_outcome_has_its_facts() -> None:
    errors = {outcome for outcome in Outcome if outcome.facts.ci == "error"}
    assert errors == {Outcome.BOOT_FAILED, Outcome.INFRA, Outcome.CANCELLED}


@pytest.mark.parametrize(
    ("outcome", "signature", "unexplained"),
    [
        (Outcome.OTHER_CRASH, None, True),
        (Outcome.OTHER_CRASH, How.NEAR, True),
        (Outcome.OTHER_CRASH, How.OTHER, False),
        (Outcome.CANCELLED, None, False),
        (Outcome.BOOT_FAILED, None, False),
    ],
)
def test_a_death_that_may_be_this_bug(
    outcome: Outcome, signature: How | None, unexplained: bool
) -> None:
    assert is_unexplained(outcome, died(signature)) is unexplained
    assert not is_unexplained(outcome, None)
