"""The rows of a version map that lies beside a run, as a page shows them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_repro.report.grid import Grid
from vllm_repro.report.wording import simulated
from vllm_repro.verdict.verdict import Expected

__all__ = ["Mapped", "mapped"]

_MOST = 200


@dataclass(frozen=True)
class Mapped:
    """mark: the word that a simulated map stands beside. where: the file, relative to the run's folder."""

    grid: Grid
    reading: str
    started_at: str
    mark: str
    where: str


def mapped(loaded: Any, scenario: str, where: str) -> Mapped | None:
    """`loaded` is what `versions.json` holds, already redacted; None where it is no map of `scenario`, or not of this schema."""
    try:
        if loaded["schema"] != 1 or loaded["scenario"] != scenario:
            return None
        rows = [
            (
                str(row["version"]),
                str(arm["declared"]),
                str(arm["name"]),
                str(arm["fate"]),
                f"{arm['k']} of {arm['n']}" if arm["n"] else "-",
                str(row["run"] or "-"),
            )
            for row in loaded["rows"]
            for arm in row["arms"]
        ]
        dids = dict.fromkeys(Expected(arm["expected"]).did for row in loaded["rows"] for arm in row["arms"])
        heads = ("release", "declared", "arm", "it", " or ".join(dids) or "died", "run")
        rows += [(str(version), "-", "-", "not tried", "-", "-") for version in loaded["pending"]]
        mark = simulated(str(loaded["evidence"]))
        return Mapped(Grid(heads, tuple(rows[:_MOST])), str(loaded["reading"]), str(loaded["started_at"]), mark, where)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None
