"""The first sentence of a report."""

from __future__ import annotations

import pytest

from tests.golden_files import assert_golden
from tests.report_examples import DIED, EXAMPLES, LIVED, replace, report
from vllm_repro.report.model import ArmReport, arm_fields
from vllm_repro.report.wording import plain_sentence
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Verdict, arm_result


def test_the_sentence_of_each_example() -> None:
    lines = [f"{folder.name}\n    {plain_sentence(report(folder))}." for folder in EXAMPLES]
    assert_golden("sentences.txt", "\n".join(lines) + "\n")


def with_outcomes(arm: ArmReport, *outcomes: Outcome) -> ArmReport:
    trials = tuple(
        replace(arm.trials[0], outcome=outcome, number=n) for n, outcome in enumerate(outcomes, 1)
    )
    return replace(arm, trials=trials, **arm_fields(arm_result(arm.name, arm.expected, outcomes)))


@pytest.mark.parametrize(
    ("outcomes", "verdict", "said"),
    [
        (
            [Outcome.CRASH, Outcome.CLEAN],
            Verdict.REPRODUCES,
            "shows this bug: it died in 1 of 2 boots; with --enforce-eager it lived in 1 boot, ",
        ),
        (
            [Outcome.OTHER_CRASH],
            Verdict.CHANGED,
            "failed in another way than this bug; declared fixed",
        ),
        (
            [Outcome.UNTRIGGERED],
            Verdict.INCONCLUSIVE,
            "was not shown to have this bug, nor to be free of it; declared",
        ),
        (
            [Outcome.CLEAN],
            Verdict.QUIET,
            "crossed the boundary of this bug and did not show it; declared fixed",
        ),
        # The rehearsal does not imitate the bug.
        (
            [Outcome.CLEAN],
            Verdict.INCONCLUSIVE,
            "was not shown to have this bug, nor to be free of it; declared",
        ),
    ],
)
def test_it_claims_only_what_the_run_saw(
    outcomes: list[Outcome], verdict: Verdict, said: str
) -> None:
    made = report(DIED)
    arms = (with_outcomes(made.arms[0], *outcomes), *made.arms[1:])
    made = replace(made, arms=arms, verdict=verdict)
    assert plain_sentence(made).startswith(f"vLLM 0.23.0 in the lab {said}")


def test_an_arm_that_did_not_run_or_died_avoids_nothing() -> None:
    made = report(DIED)
    for eager in (with_outcomes(made.arms[1], Outcome.CRASH), replace(made.arms[1], trials=())):
        result = arm_fields(arm_result("eager", eager.expected, eager.counted.outcomes))
        arms = (made.arms[0], replace(eager, **result))
        assert "it lived" not in plain_sentence(replace(made, arms=arms))


def test_the_other_arms_alone_do_not_show_the_bug_gone() -> None:
    made = report(DIED)
    without = replace(made, arms=made.arms[1:], verdict=Verdict.QUIET)
    assert "nor to be free of it" in plain_sentence(without)


@pytest.mark.parametrize("evidence", ["gpu", "cpu", "lab", "rehearsal", "unknown"])
def test_it_names_what_ran(evidence: str) -> None:
    said = plain_sentence(replace(report(LIVED), evidence=evidence))
    first = {
        "cpu": "vLLM 0.24.0 on a CPU",
        "lab": "vLLM 0.24.0 in the lab",
        "rehearsal": "The rehearsal's imitation of vLLM",
    }
    assert said.startswith(first.get(evidence, "vLLM 0.24.0 crossed"))
