"""The schemas of `report.json` and `versions.json`, and every such file that a test makes held against them.

What is published allows unknown keys, for readers meet newer reports. What this version writes has none: in the tests each object may
hold the keys that the schema names and no other, so that a new key is written into the schema too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import jsonschema

import vllm_repro.report
from vllm_repro.report.model import RunReport
from vllm_repro.report.version_map import VersionMap

__all__ = ["SCHEMA", "VERSIONS_SCHEMA", "check_files", "closed", "hold_all", "unheld"]


def _read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        Path(vllm_repro.report.__file__).with_name(f"{name}.schema.json").read_text(encoding="utf-8")
    )
    jsonschema.Draft202012Validator.check_schema(loaded)
    return loaded


def closed(schema: Any) -> Any:
    """Return `schema` without room for unknown keys."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(one) for name, one in schema.items()}
    # `properties` and `$defs` hold names of keys; a schema is what has a type beside them.
    return {"additionalProperties": False, **found} if isinstance(schema.get("properties"), dict) else found


SCHEMA, VERSIONS_SCHEMA = _read("report"), _read("versions")
_CLOSED = {name: jsonschema.Draft202012Validator(closed(_read(name))) for name in ("report", "versions")}


def check_files(folder: Path) -> None:
    """All `report.json` and `versions.json` below `folder`."""
    for name, validator in _CLOSED.items():
        for path in folder.rglob(f"{name}.json"):
            validator.validate(json.loads(path.read_text(encoding="utf-8")))


def hold_all() -> None:
    """From now on each one that is made in this process is held against its schema; what others make, `check_files` does."""
    for kind, name in ((RunReport, "report"), (VersionMap, "versions")):
        kind.as_json = _held(kind.as_json, _CLOSED[name])  # type: ignore[method-assign, assignment]  # that is the point


_unheld = 0


@contextmanager
def unheld() -> Iterator[None]:
    """For tests whose journals hold on purpose what no run writes."""
    global _unheld
    _unheld += 1
    try:
        yield
    finally:
        _unheld -= 1


def _held(
    as_json: Callable[[Any], dict[str, Any]], validator: jsonschema.Draft202012Validator
) -> Callable[[Any], dict[str, Any]]:
    @wraps(as_json)
    def held(self: Any) -> dict[str, Any]:
        made = as_json(self)
        if not _unheld:
            validator.validate(json.loads(json.dumps(made)))
        return made

    return held
