from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from msgspec import Struct

from tests.report_examples import EXAMPLES, replace, report
from vllm_repro.report.json_report import PatchedFile, RunJson, report_dict

CONTRACT = {
    "": (
        "scenario issue verdict expected evidence rehearsal harness_version started_at duration_s"
        " environment arms throughput infra reproduce"
    ),
    "arms": "name command server result k n bound trials",
    "server": "kind image digest vllm_version argv replaced patched weights env",
    "trials": "outcome phase trigger death client_saw boot_s duration_s requests throughput log",
    "trigger": "crossed evidence",
    "death": "detected_by latency_s exception message frames signature channels",
    "requests": "sent ok failed",
    "environment": "os python cpus memory_gb docker gpus driver",
}
"""Keys that scripts outside of this repository rely on, by the key of their object."""


# `jsonschema.validate` would check the schema for every report.
RUN = jsonschema.Draft202012Validator(msgspec.json.schema(RunJson))


def objects(value: Any, name: str = "") -> list[tuple[str, dict[str, Any]]]:
    if isinstance(value, list):
        return [one for item in value for one in objects(item, name)]
    if not isinstance(value, dict):
        return []
    return [(name, value), *(one for key, item in value.items() for one in objects(item, key))]


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_the_schema_and_the_contract_hold(folder: Path) -> None:
    made = report_dict(report(folder))
    RUN.validate(made)
    assert msgspec.to_builtins(msgspec.convert(made, RunJson)) == msgspec.to_builtins(
        msgspec.json.decode(json.dumps(made), type=RunJson)
    )
    for name, found in objects(made):
        if name in CONTRACT and not (name == "requests" and "sent" not in found):
            assert set(CONTRACT[name].split()) <= set(found), name


def test_the_schema_is_sound_and_leaves_room_for_new_keys() -> None:
    assert_sound(RunJson)


def assert_sound(record: type[Struct]) -> None:
    """Check that a record's schema is valid, takes new keys, and requires all of the record's."""
    schema = msgspec.json.schema(record)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert "additionalProperties" not in schema["$defs"][record.__name__]
    assert set(schema["$defs"][record.__name__]["required"]) == set(record.__struct_fields__) - {
        "schema"
    }


@pytest.mark.parametrize(("key", "value"), [("verdict", "dunno"), ("schema", 2), ("arms", [{}])])
def test_a_broken_report_breaks_the_schema(key: str, value: object) -> None:
    broken = {**report_dict(report(EXAMPLES[0])), key: value}
    with pytest.raises(jsonschema.ValidationError):
        RUN.validate(broken)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(broken, RunJson)


def test_a_patched_file_that_nobody_looked_for_has_no_such_key() -> None:
    assert "imported" not in msgspec.to_builtins(PatchedFile(file="vllm/a.py", sha256="0"))


def test_a_lone_surrogate_of_a_journal_is_valid_json() -> None:
    made = replace(report(EXAMPLES[0]), because="\ud800")
    assert json.loads(json.dumps(report_dict(made)))["because"] == "\ud800"
