"""Lines that scenarios quote, in the sources of the cached releases."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import Source
from vllm_repro.scenario.catalogue import all_scenarios
from vllm_repro.scenario.scenario import Scenario

pytestmark = [pytest.mark.live, pytest.mark.depends("all")]


def named(scenario: Scenario) -> str:
    return scenario.id


def lines_of(source: str, function: str) -> Sequence[str]:
    """Return the lines of `Class.method` without indentation; none if it does not exist."""
    body: Sequence[ast.stmt] = ast.parse(source).body
    found: ast.stmt | None = None
    for name in function.split("."):
        found = next((one for one in body if getattr(one, "name", None) == name), None)
        body = getattr(found, "body", ())
    return (
        []
        if found is None
        else [line.strip() for line in source.splitlines()[found.lineno - 1 : found.end_lineno]]
    )


@pytest.mark.parametrize(
    "scenario", all_scenarios(Path(__file__).parents[2] / "scenarios"), ids=named
)
def test_the_quoted_line_stands_in_its_function(scenario: Scenario) -> None:
    quoted = scenario.defect
    assert quoted is not None
    release = ReleaseCache().get(Source(release=scenario.lab_release))
    if release is None:
        pytest.skip(f"vLLM {scenario.lab_release} is not in the cache")
    source = (release.packages / quoted.file).read_text(encoding="utf-8")
    assert quoted.code in lines_of(source, quoted.function)
