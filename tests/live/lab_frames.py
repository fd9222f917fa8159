"""Origin of the frames of a death in the lab, read from the release's sources."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path


def strange_frames(frames: Sequence[str], release: Path) -> list[str]:
    """Return the `file:function` frames that neither the release at `release` nor torch defines."""
    return [
        frame for frame in frames if not frame.startswith("torch/") and not _defined(frame, release)
    ]


def _defined(frame: str, release: Path) -> bool:
    file, _, function = frame.rpartition(":")
    path = release / file
    if not path.is_file():
        return False
    if function.startswith("<"):
        return True  # <genexpr>, <lambda>: Python's own names, which no file defines
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function
        for node in ast.walk(tree)
    )
