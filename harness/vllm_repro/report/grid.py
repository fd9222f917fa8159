"""A table as plain text, and the Markdown of it. Pure."""

from __future__ import annotations

from typing import NamedTuple

from vllm_repro.report.escape import cell

__all__ = ["Grid", "table"]


class Grid(NamedTuple):
    """Plain text, for whatever escapes it. The cells of a row stand under `heads`."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def table(grid: Grid) -> str:
    """As Markdown."""
    lines = ["| " + " | ".join(grid.heads) + " |", "|---" * len(grid.heads) + "|"]
    return "\n".join((*lines, *("| " + " | ".join(map(cell, row)) + " |" for row in grid.rows)))
