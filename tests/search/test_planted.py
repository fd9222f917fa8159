"""Secrets and private names planted into journals appear in no version map."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from tests.core.report.journal_fields import TEXT_FIELDS, Field, planted
from tests.planted_outputs import leaks, shown
from tests.report_examples import replace
from tests.search.test_version_map import map_of
from tests.secrets_planted import PLANTS, Plant
from vllm_repro.report.model import RunReport, arm_fields
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.verdict import Standing, arm_result
from vllm_repro_search.record import markdown, terminal
from vllm_repro_search.versions.record import row_of


def outputs(made: RunReport) -> Iterator[tuple[str, str]]:
    """Return the forms of a map. It quotes the crash of a release that did not boot."""
    arm = made.arms[0]
    outcomes = [Outcome.BOOT_FAILED]
    trials = tuple(replace(trial, outcome=outcomes[0]) for trial in arm.trials[:1])
    failed = replace(arm, trials=trials, **arm_fields(arm_result(arm.name, arm.expected, outcomes)))
    row = row_of(
        replace(made, arms=(failed,)), made.vllm_version or "0.23.0", Standing.BAD, made.evidence
    )
    version_map = structs.replace(map_of([row]), arms=(arm.name,))
    yield "md", markdown(version_map)
    yield "terminal", terminal(version_map, "versions.md", "")
    yield "json", json.dumps(version_map.as_dict(), ensure_ascii=False)


@pytest.mark.parametrize("group", range(12))
def test_each_kind_planted_where_texts_come_from(group: int) -> None:
    assert list(leaks(outputs, PLANTS[group::12])) == []


@given(TEXT_FIELDS, st.sampled_from(PLANTS))
def test_no_field_of_a_journal_lets_a_secret_through(field: Field, plant: Plant) -> None:
    made = planted(*field, lambda was: f"{was} {plant.written}")
    assert [name for name, text in outputs(made) if plant.hidden in text] == []


def test_the_plants_would_be_seen() -> None:
    """Check that the search can fail: a harmless text appears."""
    names = {"md", "terminal", "json"}
    assert shown(outputs, "harmlesspayload", names) == names
