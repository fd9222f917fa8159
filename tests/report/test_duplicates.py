from __future__ import annotations

from dataclasses import replace

from tests import report_examples as examples
from tests.report_examples import report
from vllm_repro.report.duplicates import duplicates
from vllm_repro.scenario.catalogue import all_scenarios

SCENARIOS = all_scenarios()
DIED, LIVED = report(examples.DIED), report(examples.LIVED)
TQ, FIX, CHUNKED = "tq-prefix-hit-unreserved", "vllm-project/vllm#44053", "vllm-project/vllm#41726"


def test_what_the_scenario_names_and_no_fix() -> None:
    found = duplicates(DIED, SCENARIOS)
    assert found == ["vllm-project/vllm#43357", "vllm-project/vllm#46767", "vllm-project/vllm#41565"]


def test_a_run_in_which_nothing_died_is_the_same_as_nothing() -> None:
    assert duplicates(LIVED, SCENARIOS) == []


def test_a_death_that_another_scenario_has() -> None:
    other = replace(DIED, scenario=TQ, issue=FIX, filed=False)
    assert CHUNKED in duplicates(other, SCENARIOS)
    cured = replace(other, version="0.32.0")
    assert duplicates(cured, SCENARIOS) == []  # there #41726 is fixed, and this is another bug


def test_a_scenario_that_the_package_does_not_have() -> None:
    stranger = replace(DIED, scenario="stranger", issue="o/r#1", related=("o/r#2",))
    assert duplicates(stranger, SCENARIOS) == [CHUNKED, "o/r#2"]
    assert duplicates(replace(stranger, arms=()), SCENARIOS) == []
