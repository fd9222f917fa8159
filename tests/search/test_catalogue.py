"""Matrix of bugs and releases: fresh files, a row a scenario, and which sighting counts."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest

from tests.conftest import Harness
from tests.core.report.test_html import assert_sound, text_of
from tests.report_examples import replace
from vllm_repro.releases.known import NEWEST
from vllm_repro.scenario.catalogue import all_scenarios
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_search.versions.catalogue import (
    FILES,
    Bug,
    Ledger,
    Upstream,
    UpstreamState,
    bugs,
    page,
    prices,
    upstream,
)
from vllm_repro_search.versions.record import ReleaseResult

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "reports"
RESULTS = REPORTS / "results"


@pytest.fixture(scope="module")
def rows() -> dict[str, Bug]:
    return {bug.scenario.id: bug for bug in bugs(REPORTS)}


def test_the_files_are_what_scenarios_and_reports_give(rows: dict[str, Bug]) -> None:
    for name, render in FILES.items():
        assert (RESULTS / name).read_text(encoding="utf-8") == render(list(rows.values())), (
            "make catalogue"
        )
    kept = (ROOT / "scenarios" / "prices.json").read_text(encoding="utf-8")
    assert kept == prices(REPORTS), "make catalogue"
    assert "at 1 stream (vLLM 0.24.0; 1 boot each, too few to call it a difference;" in kept


def test_the_ledger_has_its_schema_and_what_the_matrix_shows(rows: dict[str, Bug]) -> None:
    text = (RESULTS / "catalogue.json").read_text(encoding="utf-8")
    jsonschema.validate(json.loads(text), msgspec.json.schema(Ledger))
    known = {bug.id: bug for bug in msgspec.json.decode(text, type=Ledger).bugs}
    assert known.keys() == rows.keys()
    for tree_row in assert_sound(page(list(rows.values()))).iter("tr"):
        shown = {
            str(cell.get("data-release")): " ".join(text_of(cell).split())
            for cell in tree_row
            if cell.get("data-release")
        }
        seen = known[str(tree_row.get("id"))].releases if shown else ()
        signs = {each.release: f"{each.look[0]} {each.evidence.upper()}" for each in seen}
        assert shown == signs
    assert all((REPORTS / seen.path).is_file() for bug in known.values() for seen in bug.releases)
    (eager,) = known["tq-chunked-prefill"].workarounds[:1]
    assert (eager.change, len(eager.prices)) == ("with --enforce-eager", 1)


def test_list_and_diagnose_read_the_ledger(harness: Harness, rows: dict[str, Bug]) -> None:
    listed = {row["scenario"]: row for row in json.loads(harness("list", "--json").out)}
    assert listed.keys() == rows.keys()
    for name, row in listed.items():
        assert row["state"] == rows[name].upstream.state
        assert {seen["release"] for seen in row["releases"]} == rows[name].sightings.keys()
    log = next((ROOT / "tests" / "data" / "pasted").glob("tq-chunked-prefill*"))
    (match, *_) = json.loads(harness("diagnose", str(log), "--json").out)["matches"]
    same = ("scenario", "state", "releases")
    assert [match[key] for key in same] == [listed[match["scenario"]][key] for key in same]


def test_each_scenario_has_a_row_of_upstream() -> None:
    known = upstream()
    scenarios = {scenario.id: scenario for scenario in all_scenarios(ROOT / "scenarios")}
    assert known.keys() == scenarios.keys(), "scenarios/upstream.json"
    for name, row in known.items():
        assert (row.state is UpstreamState.NOT_FILED) is not scenarios[name].filed, name
        assert row.subsystem
        assert row.checked or row.state is UpstreamState.UNKNOWN, f"{name}: when was that seen?"


@pytest.mark.parametrize("state", UpstreamState)
def test_bugs_of_the_newest_release_are_grouped_by_issue(
    rows: dict[str, Bug], state: UpstreamState
) -> None:
    bug = replace(rows["sco-lazy-starves"], upstream=Upstream("somewhere", state, "2026-09"))
    closed = state in (UpstreamState.STALE, UpstreamState.CLOSED, UpstreamState.CLOSED_STALE)
    words = ("open, or no report found", "closed or stale")
    assert bug.group == f"Still in {NEWEST}, {words[closed]} upstream"


def test_only_a_release_that_was_tried_is_decided(rows: dict[str, Bug]) -> None:
    bug = rows["sco-lazy-starves"]
    older = {release: seen for release, seen in bug.sightings.items() if release != NEWEST}
    unclear = {NEWEST: replace(bug.sightings[NEWEST], fate=ReleaseResult.UNTRIGGERED)}
    lives = {NEWEST: replace(bug.sightings[NEWEST], fate=ReleaseResult.LIVES)}
    groups = [replace(bug, sightings=seen).group for seen in (older, unclear, lives)]
    assert groups == [f"Not decided in {NEWEST}", f"Not decided in {NEWEST}", f"Not in {NEWEST}"]


def test_a_cell_has_its_sign_evidence_and_link(rows: dict[str, Bug]) -> None:
    bug = rows["tq-chunked-prefill"]
    tree = assert_sound(page([bug]))
    (row,) = (line for line in tree.iter("tr") if line.get("id") == bug.scenario.id)
    cells = {cell.get("data-release"): cell for cell in row if cell.get("data-release")}
    assert cells.keys() == bug.sightings.keys()
    signs = {release: " ".join(text_of(cell).split()) for release, cell in cells.items()}
    assert (signs["0.22.1"], signs["0.23.0"], signs["0.24.0"]) == ("✗ LAB", "✗ GPU", "✓ GPU")
    for cell in cells.values():
        (link,) = cell.iter("a")
        assert (RESULTS / str(link.get("href"))).is_file()


def test_a_release_with_exchanged_packages_is_not_that_release(tmp_path: Path) -> None:
    kept = json.loads((REPORTS / "examples/versions/sco-hybrid/versions.json").read_bytes())
    run = json.loads(next(REPORTS.glob("examples/*/report.json")).read_bytes())
    for name, content in {
        "examples/versions/sco-hybrid/versions.json": kept
        | {"rows": [kept["rows"][0] | {"version": "0.24.0 with a==1"}]},
        "examples/a/report.json": run | {"vllm_version": "0.24.0+with.a.1.h2"},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    assert not any(bug.sightings for bug in bugs(tmp_path))


def test_the_strongest_evidence_counts_then_the_latest(tmp_path: Path) -> None:
    source = REPORTS / "examples" / "versions" / "sco-hybrid" / "versions.json"
    kept = json.loads(source.read_text(encoding="utf-8"))
    (row,) = (row for row in kept["rows"] if row["version"] == "0.21.0")
    assert row["arms"][0]["fate"] == "dies"
    lives = {**row, "arms": [{**row["arms"][0], "fate": "lives"}]}
    maps = {
        "first": kept,
        "later": kept | {"rows": [lives], "started_at": "2027-01-01T00:00:00Z"},
        "gpu": kept | {"rows": [row], "evidence": "gpu", "started_at": "2026-01-01T00:00:00Z"},
    }
    seen = []
    for name, content in maps.items():
        folder = tmp_path / "examples" / "versions" / "sco-hybrid" / name
        folder.mkdir(parents=True)
        (folder / "versions.json").write_text(json.dumps(content), encoding="utf-8")
        (bug,) = (bug for bug in bugs(tmp_path) if bug.scenario.id == "sco-hybrid")
        assert set(bug.sightings) == set(kept["versions"])
        seen.append((bug.sightings["0.21.0"].fate, bug.sightings["0.21.0"].evidence))
    assert seen == [("dies", Evidence.LAB), ("lives", Evidence.LAB), ("dies", Evidence.GPU)]
