"""Example version maps: their Markdown equals their JSON, and no link is dead."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.report_examples import MAPS
from vllm_repro.scenario.catalogue import find

EXPLAINED = (Path(__file__).parents[2] / "reports" / "results" / "version-maps.md").read_text(
    encoding="utf-8"
)


def test_there_are_maps() -> None:
    assert MAPS


@pytest.fixture(params=MAPS, ids=lambda folder: "/".join(folder.parts[-2:]))
def kept(request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    folder: Path = request.param
    return folder, json.loads((folder / "versions.json").read_text(encoding="utf-8"))


def scenario_of(folder: Path) -> str:
    """Return the scenario of a map; one of a release that was added later lies in the folder of the older map."""
    return folder.name if folder.parent.name == "versions" else folder.parent.name


def test_a_kept_map_is_whole_and_of_its_scenario(kept: tuple[Path, dict[str, Any]]) -> None:
    folder, loaded = kept
    assert (loaded["scenario"], loaded["pending"]) == (scenario_of(folder), [])
    assert loaded["evidence"] == ("lab" if find(scenario_of(folder)).lab else "cpu")
    if folder.name != scenario_of(folder):
        assert loaded["versions"] == [folder.name]
    assert loaded["interrupted"] is None
    status = find(scenario_of(folder)).status
    assert loaded["status"] == {
        "bad": status.bad,
        "good": status.good,
    }, "the scenario says something else by now"


def test_its_markdown_says_the_same(kept: tuple[Path, dict[str, Any]]) -> None:
    folder, loaded = kept
    text = (folder / "versions.md").read_text(encoding="utf-8")
    shown = " ".join(re.findall(r"\*\*(.*?)\.?\*\*", text)).lower()
    for sentence in loaded["reading"].split(". "):
        assert sentence.lower() in shown
    rows = re.findall(r"^\| (\d\S*) \| \S+ \| (\S+) \| ([^|]*?) \|", text, flags=re.MULTILINE)
    given = {(version, arm): set(re.findall(r"[a-z-]+", what)) for version, arm, what in rows}
    assert given == {
        (row["version"], arm["name"]): (
            {trial["outcome"] for trial in arm["trials"]} or {arm["fate"]}
        )
        for row in loaded["rows"]
        for arm in row["arms"]
    }
    assert not re.findall(r"\]\((?!https://)", text), "a run that is not kept is not linked"
    assert not re.search(r"/(?:root|home|tmp)/", text + json.dumps(loaded))


def test_each_reading_is_explained(kept: tuple[Path, dict[str, Any]]) -> None:
    folder, loaded = kept
    section = EXPLAINED.partition(f"## `{scenario_of(folder)}`\n")[2].partition("\n## ")[0]
    for sentence in loaded["reading"].split(". "):
        assert sentence in " ".join(section.split())
