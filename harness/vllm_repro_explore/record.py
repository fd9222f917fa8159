"""What earlier searches played and found, from their `explore.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_repro_explore.finding import Finding

__all__ = ["Record", "read_record"]


@dataclass(frozen=True, kw_only=True)
class Record:
    """Searches of the same kind, of any vLLM."""

    searches: int = 0
    # the highest seed of those of this vLLM; 0 without one
    last: int = 0
    # for each finding, the folder of the search that saw it first
    first: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def seen_in(self, finding: Finding) -> str | None:
        """Return the folder of the first search with this finding; None if it is new."""
        return self.first.get((finding.kind.value, finding.site))


def read_record(out: Path, version: str, searched: Mapping[str, Any]) -> Record:
    """Read the searches below `out` that searched this, in the order of their folders' names.

    A file that is no such JSON is left out.
    """
    searches, last, first = 0, 0, dict[tuple[str, str], str]()
    for file in sorted((out / "explore").glob("[0-9]*/explore.json")):
        try:
            earlier = json.loads(file.read_text(encoding="utf-8"))
            if any(earlier.get(key) != value for key, value in searched.items()):
                continue
            found = [(one["kind"], one["site"]) for one in earlier.get("findings", ())]
            seed = (earlier["seeds"][1] or 0) if earlier["vllm_version"] == version else 0
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
        searches, last = searches + 1, max(last, seed)
        for key in found:
            first.setdefault(key, file.parent.name)
    return Record(searches=searches, last=last, first=first)
