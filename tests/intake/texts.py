"""Drafts from texts, for the tests of intake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_repro.journal.redact import Redactor
from vllm_repro.scenario.reader import read
from vllm_repro.scenario.scenario import Scenario
from vllm_repro_intake.draft import Draft, draft
from vllm_repro_intake.facts import read_facts

ISSUES = Path(__file__).parents[1] / "data" / "issues"
SERVE = "vllm serve org/model --max-num-batched-tokens 4096"


def drafted(text: str, *, more: str = "", **options: Any) -> Draft:
    return draft(
        read_facts(Redactor().text(text), more), "my-bug", **{"newest": "0.33.0"} | options
    )


def checked(made: Draft) -> Scenario:
    """Return the scenario of a draft, in which `check` finds nothing wrong."""
    scenario, problems = read(Path("my_bug.py"), made.text)
    assert not problems, f"{problems}\n{made.text}"
    assert scenario is not None
    return scenario
