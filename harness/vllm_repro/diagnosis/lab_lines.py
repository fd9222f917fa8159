"""What our plugins saw inside the engine: lines that they put into the server's own log, so that the log stays the one record.

INFO 11-21 20:22:35 [...] LAB observed store {"event": 3, "blocks": 80, "distinct": 54}
REPRO observed imported {"file": "vllm/sampling_params.py", "sha256": "…", "pid": 4711}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_repro.diagnosis.log_text import Line

__all__ = ["Observed", "observed"]

_LINE = re.compile(r"(?:LAB|REPRO) observed (\w+) (\{.*\})\s*$")
_MOST = 10_000


@dataclass(frozen=True)
class Observed:
    """One observation: its kind, such as "store", and what was seen."""

    kind: str
    values: Mapping[str, Any] = field(default_factory=dict)


def observed(lines: Iterable[Line]) -> tuple[Observed, ...]:
    """Every observation of a log, in order; the first 10,000, since an engine that runs for a day makes more than anybody reads."""
    found: list[Observed] = []
    for line in lines:
        if " observed " not in line.text or not (match := _LINE.search(line.text)):
            continue
        try:
            values = json.loads(match[2])
        except ValueError:
            continue  # a line that the engine's end cut off
        found.append(Observed(match[1], values))
        if len(found) == _MOST:
            break
    return tuple(found)
