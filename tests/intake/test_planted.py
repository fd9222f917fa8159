"""Secrets and private names planted into journals appear in no draft."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.report.journal_fields import TEXT_FIELDS, Field, planted
from tests.planted_outputs import leaks, shown
from tests.secrets_planted import PLANTS, Plant
from vllm_repro.report.files import render
from vllm_repro.report.model import RunReport
from vllm_repro.report.script import no_script
from vllm_repro.scenario.catalogue import all_scenarios
from vllm_repro_intake.issue_draft import draft, duplicates

SCENARIOS = all_scenarios()
SCRIPTED = next(scenario for scenario in SCENARIOS if not no_script(scenario))


def outputs(made: RunReport) -> Iterator[tuple[str, str]]:
    script = render(made, "python", SCRIPTED)
    body = draft(made, duplicates(made, SCENARIOS), script=script[:3_000])
    yield "issue", body.body + body.title


@pytest.mark.parametrize("group", range(12))
def test_each_kind_planted_where_texts_come_from(group: int) -> None:
    assert list(leaks(outputs, PLANTS[group::12])) == []


@given(TEXT_FIELDS, st.sampled_from(PLANTS))
def test_no_field_of_a_journal_lets_a_secret_through(field: Field, plant: Plant) -> None:
    made = planted(*field, lambda was: f"{was} {plant.written}")
    assert [name for name, text in outputs(made) if plant.hidden in text] == []


def test_the_plants_would_be_seen() -> None:
    """Check that the search can fail: a harmless text appears."""
    names = {"issue"}
    assert shown(outputs, "harmlesspayload", names) == names
