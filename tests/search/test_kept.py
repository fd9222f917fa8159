"""Kept maps and searches: their files, pages and answers still agree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest

from tests.core.report.test_json_report import assert_schema
from tests.report_examples import MAPS, without_run_links
from vllm_repro.conversion import convert
from vllm_repro.scenario.catalogue import find
from vllm_repro_search.bisect.boots import Bisection
from vllm_repro_search.minimize.verb import Minimization
from vllm_repro_search.record import SearchRecord, markdown
from vllm_repro_search.threshold.verb import Threshold
from vllm_repro_search.versions.record import VersionMap

EXPLAINED = (Path(__file__).parents[2] / "reports" / "results" / "version-maps.md").read_text(
    encoding="utf-8"
)


assert MAPS
# `jsonschema.validate` would check the schema for every map.
MAP = jsonschema.Draft202012Validator(msgspec.json.schema(VersionMap))


@pytest.fixture(params=MAPS, ids=lambda folder: "/".join(folder.parts[-2:]))
def kept(request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    folder: Path = request.param
    return folder, json.loads((folder / "versions.json").read_text(encoding="utf-8"))


def scenario_of(folder: Path) -> str:
    """Return the scenario of a map. A later map of one release is in the first map's folder."""
    return folder.name if folder.parent.name == "versions" else folder.parent.name


def test_a_kept_map_is_whole_and_of_its_scenario(kept: tuple[Path, dict[str, Any]]) -> None:
    folder, loaded = kept
    MAP.validate(loaded)
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


def test_its_page_and_its_explanation_say_the_same(kept: tuple[Path, dict[str, Any]]) -> None:
    folder, loaded = kept
    section = EXPLAINED.partition(f"## `{scenario_of(folder)}`\n")[2].partition("\n## ")[0]
    text = (folder / "versions.md").read_text(encoding="utf-8")
    shown = " ".join(re.findall(r"\*\*(.*?)\.?\*\*", text)).lower()
    for sentence in loaded["reading"].split(". "):
        assert sentence.lower() in shown
        assert sentence in " ".join(section.split()), "reports/results/version-maps.md"
    if "| arm |" not in text:  # of a map with one arm
        text = re.sub(r"(?m)^(\| \d\S* \| \S+ \|)", r"\1 reported |", text)
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


def test_the_schema_is_sound_and_leaves_room_for_new_keys() -> None:
    assert_schema(VersionMap, optional={"rows", "interrupted"})


EXAMPLES = Path(__file__).parents[2] / "reports" / "examples"
KEPT = [
    (kind, path)
    for kind in (Bisection, Threshold, Minimization)
    for path in sorted(EXAMPLES.glob(f"{kind.verb}/*/*.json"))
]


@pytest.mark.parametrize(
    ("kind", "path"), KEPT, ids=[f"{path.parts[-3]}-{path.parts[-2]}" for _, path in KEPT]
)
def test_a_kept_record_renders_as_it_was_written(kind: type[SearchRecord], path: Path) -> None:
    kept = json.loads(path.read_text(encoding="utf-8"))
    record = convert(kept, kind)
    again = json.loads(json.dumps(record.as_dict()))
    assert again == {name: kept.get(name) for name in again}  # an older record lacks a newer key
    assert without_run_links(markdown(record)) == path.with_suffix(".md").read_text(
        encoding="utf-8"
    )


ANSWERS = {
    "bisect/min-tokens-stop-ids": ("0.29.0", 0),
    "bisect/sco-hybrid": ("92397ca17c40", 0),
    "bisect/sco-hybrid-branches": ("b4c904394063", 0),
    "bisect/tq-chunked-prefill": ("71672a27ecf3", 0),
    # The parts of the fix are the first, the third and the last one of those left; the others do
    # not boot.
    "bisect/tq-chunked-prefill-parts": (None, 2),
    "threshold/tq-chunked-prefill": (4225, 0),
    "minimize/tq-mtp-cudagraphs": (
        [
            "--kv-cache-dtype turboquant_k8v4",
            """--speculative-config '{"method":"mtp","num_speculative_tokens":3}'""",
        ],
        0,
    ),
}


def test_each_kept_search_has_its_answer() -> None:
    records = {
        f"{path.parts[-3]}/{path.parts[-2]}": convert(json.loads(path.read_bytes()), kind)
        for kind, path in KEPT
    }
    assert {
        name: (record.as_dict()["answer"], record.exit_status) for name, record in records.items()
    } == ANSWERS
