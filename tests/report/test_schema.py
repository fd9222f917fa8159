"""That the schemas say all, and that a report which breaks them fails the test that makes it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.report_examples import EXAMPLES, report
from tests.schemas import SCHEMA, VERSIONS_SCHEMA, check_files, closed
from vllm_repro.diagnosis.diagnosis import Phase
from vllm_repro.diagnosis.signature import How
from vllm_repro.evidence import Evidence
from vllm_repro.report.model import ArmReport
from vllm_repro.running.death_signs import Channel
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.verdict.outcome import Outcome
from vllm_repro.verdict.release_result import ReleaseResult
from vllm_repro.verdict.throughput import ThroughputChange
from vllm_repro.verdict.verdict import Expected, Result, Standing, Verdict

RICHEST = max(EXAMPLES, key=lambda folder: (folder / "journal.jsonl").stat().st_size)


def enums(schema: Any, name: str = "") -> Iterator[tuple[str, set[str]]]:
    """Each enum of a schema with the name of its key."""
    if isinstance(schema, dict):
        if isinstance(schema.get("enum"), list):
            yield name, {one for one in schema["enum"] if one is not None}
        for key, one in schema.items():
            yield from enums(one, key)


@pytest.mark.parametrize("schema", [SCHEMA, VERSIONS_SCHEMA], ids=["report", "versions"])
def test_a_schema_names_what_the_code_can_say(schema: dict[str, Any]) -> None:
    words: dict[str, type[Enum]] = {
        "verdict": Verdict,
        "evidence": Evidence,
        "kind": ServerKind,
        "outcome": Outcome,
        "phase": Phase,
        "signature": How,
        "channel": Channel,
        "change": ThroughputChange,
        "result": Result,
        "fate": ReleaseResult,
        "declared": Standing,
        "expected": Expected,
    }
    found = list(enums(schema))
    for key, said in found:
        if key == "server":
            assert said == {one.value for one in ServerKind} - {"attach"}  # a map over releases starts its servers
        else:
            assert said == {one.value for one in words[key]}, key
    assert {"outcome", "result", "expected", "verdict", "signature"} <= {key for key, _ in found}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each key of each object, the first item of a list standing for all."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield (*path, key)
            yield from places(one, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def holder(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path[:-1]:
        value = value[step]
    return value


OPEN = {"env", "captured"}  # maps whose keys are not ours


def test_a_report_without_a_key_or_with_a_broken_one_breaks_the_schema() -> None:
    """Each key of the richest example in turn: taken away, turned into something else, and given a neighbour that nobody knows."""
    whole = report(RICHEST).as_json()
    strict = jsonschema.Draft202012Validator(closed(SCHEMA))
    for path in places(whole):
        if OPEN & set(path[:-1]):
            continue
        for change in ("gone", "broken", "unknown"):
            made = copy.deepcopy(whole)
            at = holder(made, path)
            if change == "gone":
                del at[path[-1]]
            elif change == "broken":
                at[path[-1]] = {"not": ["what", "it", "is"]}
            else:
                at["a key that nobody knows"] = 1
            assert not strict.is_valid(made), (path, change)
    jsonschema.validate(
        {**whole, "a key that nobody knows": 1}, SCHEMA
    )  # what is published leaves room for newer reports


def test_a_test_that_makes_a_broken_report_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    as_json = ArmReport.as_json
    monkeypatch.setattr(ArmReport, "as_json", lambda self, measured: {**as_json(self, measured), "result": "dunno"})
    with pytest.raises(jsonschema.ValidationError, match="dunno"):
        report(RICHEST).as_json()
    (tmp_path / "report.json").write_text(json.dumps({"schema": 2}), encoding="utf-8")
    with pytest.raises(jsonschema.ValidationError):
        check_files(tmp_path)
