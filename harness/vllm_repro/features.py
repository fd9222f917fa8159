"""Features beside the core, found by entry points.

The core imports none of them, and works without any.

A group `vllm_repro.<kind>` names what the features add. docs/architecture.md, "Add a feature", has
the kinds.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any


@cache
def additions(kind: str) -> dict[str, EntryPoint]:
    """Return the entry points of the group `vllm_repro.<kind>`, such as verbs, by name.

    They come from installed features: packages beside the core. Nothing is imported. The metadata
    are read once in a process.
    """
    entries = sorted(entry_points(group=f"vllm_repro.{kind}"), key=lambda entry: entry.name)
    # A feature whose folder was deleted may still be named in the metadata.
    return {entry.name: entry for entry in entries if find_spec(entry.module.partition(".")[0])}


def load(kind: str, name: str) -> Any:
    """Import and return what the entry point `name` of `vllm_repro.<kind>` refers to.

    Raises `KeyError` if no installed feature has it.
    """
    return additions(kind)[name].load()
