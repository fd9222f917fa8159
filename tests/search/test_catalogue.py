"""The catalogue: fresh files, a row for each scenario, and what is forgotten upstream."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_repro.releases.known import NEWEST
from vllm_repro.scenario.catalogue import all_scenarios
from vllm_repro_search.versions.catalogue import (
    MAPS,
    RESULTS,
    Entry,
    Upstream,
    UpstreamState,
    entries,
    markdown,
    page,
    upstream,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> list[Entry]:
    return entries(ROOT / MAPS)


def test_the_files_are_what_scenarios_and_maps_say(found: list[Entry]) -> None:
    assert (ROOT / RESULTS / "catalogue.md").read_text(encoding="utf-8") == markdown(found), "make catalogue"
    assert (ROOT / RESULTS / "catalogue.html").read_text(encoding="utf-8") == page(found), "make catalogue"


def test_each_scenario_has_a_row_of_upstream() -> None:
    rows = upstream()
    scenarios = {scenario.id: scenario for scenario in all_scenarios(ROOT / "scenarios")}
    assert rows.keys() == scenarios.keys(), "scenarios/upstream.json"
    for name, row in rows.items():
        assert (row.state is UpstreamState.NOT_FILED) is not scenarios[name].filed, name
        assert row.subsystem
        assert row.checked or row.state is UpstreamState.UNKNOWN, f"{name}: when was that seen?"


def with_state(found: list[Entry], name: str, state: UpstreamState) -> Entry:
    entry = next(one for one in found if one.scenario.id == name)
    return replace(entry, upstream=Upstream("somewhere", state, "2026-09"))


@pytest.mark.parametrize("state", UpstreamState)
def test_a_bug_of_the_newest_release_is_listed_with_its_draft(found: list[Entry], state: UpstreamState) -> None:
    dies, lives = (with_state(found, name, state) for name in ("sco-lazy-starves", "sco-hybrid"))
    closed, others = markdown([dies, lives]).partition("## Closed or stale")[2].split("## Open or not reported")
    line = f"`vllm-repro run sco-lazy-starves --server lab --vllm {NEWEST}; vllm-repro draft reports/sco-lazy-starves/latest`"
    forgotten = state in (UpstreamState.STALE, UpstreamState.CLOSED, UpstreamState.CLOSED_STALE)
    assert (line in closed, line in others) == (forgotten, not forgotten)
    assert "run sco-hybrid" not in closed + others


def test_a_release_that_was_not_tried_is_not_said_to_die(found: list[Entry]) -> None:
    dies = with_state(found, "sco-lazy-starves", UpstreamState.CLOSED_STALE)
    older = replace(dies, seen={version: arm for version, arm in dies.seen.items() if version != NEWEST})
    assert "run sco-lazy-starves" not in markdown([older])
    assert "| no map |" in markdown([replace(older, seen={})])


def test_of_two_maps_of_a_release_the_later_one_counts(tmp_path: Path) -> None:
    kept = json.loads((ROOT / MAPS / "sco-hybrid" / "versions.json").read_text(encoding="utf-8"))
    (tmp_path / "sco-hybrid" / "again").mkdir(parents=True)
    first, again = (tmp_path / "sco-hybrid" / name for name in ("versions.json", "again/versions.json"))
    first.write_text(json.dumps(kept), encoding="utf-8")
    row = next(one for one in kept["rows"] if one["version"] == "0.21.0")
    assert row["arms"][0]["fate"] == "dies"
    row["arms"][0]["fate"] = "lives"
    again.write_text(json.dumps(kept | {"rows": [row], "started_at": "2027-01-01T00:00:00Z"}), encoding="utf-8")
    (entry,) = (one for one in entries(tmp_path) if one.scenario.id == "sco-hybrid")
    assert entry.with_bug == ["0.20.2"]
    assert list(entry.seen) == kept["versions"]
