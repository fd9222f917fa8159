"""Lines that scenarios quote, in the sources of the cached releases."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tests.skipping import cannot_run
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import Source
from vllm_repro.scenario.catalogue import all_scenarios
from vllm_repro.scenario.scenario import Scenario

pytestmark = [pytest.mark.live, pytest.mark.depends("all")]

ROOT = Path(__file__).parents[2]
CI_STEPS = (ROOT / ".ci/run").read_text(encoding="utf-8")


def lines_of(source: str, function: str) -> list[str]:
    """Return the lines of `Class.method` without indentation; none if it does not exist."""
    body: list[ast.stmt] = ast.parse(source).body
    found: ast.stmt | None = None
    for name in function.split("."):
        found = next((one for one in body if getattr(one, "name", None) == name), None)
        body = getattr(found, "body", [])
    return (
        []
        if found is None
        else [line.strip() for line in source.splitlines()[found.lineno - 1 : found.end_lineno]]
    )


@pytest.mark.parametrize(
    "scenario", all_scenarios(ROOT / "scenarios"), ids=lambda scenario: scenario.id
)
def test_the_quoted_line_stands_in_its_function(scenario: Scenario) -> None:
    quoted, release = scenario.defect, ReleaseCache().get(Source(release=scenario.lab_release))
    assert quoted is not None
    if release is None:
        # CI fetches the releases in .ci/run: only one of these fails there if it is missing
        cannot_run(
            f"vLLM {scenario.lab_release} is not in the cache",
            os.environ if f" {scenario.lab_release} " in CI_STEPS else {},
        )
    source = (release.packages / quoted.file).read_text(encoding="utf-8")
    assert quoted.code in lines_of(source, quoted.function)
