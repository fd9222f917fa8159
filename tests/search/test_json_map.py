"""The schema of `versions.json`."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest

from tests.report_examples import MAPS
from vllm_repro_search.versions.record import VersionMap

# `jsonschema.validate` would check the schema for every map.
MAP = jsonschema.Draft202012Validator(msgspec.json.schema(VersionMap))


@pytest.mark.parametrize("folder", MAPS, ids=lambda folder: folder.name)
def test_the_schema_of_version_maps_holds(folder: Path) -> None:
    MAP.validate(json.loads((folder / "versions.json").read_text(encoding="utf-8")))


def test_the_schema_is_sound_and_leaves_room_for_new_keys() -> None:
    schema = msgspec.json.schema(VersionMap)
    jsonschema.Draft202012Validator.check_schema(schema)
    fields = schema["$defs"]["VersionMap"]
    assert "additionalProperties" not in fields
    assert fields["properties"].keys() - set(fields["required"]) == {"rows", "interrupted"}
