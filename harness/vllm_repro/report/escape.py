"""Text of logs and command lines within Markdown, which it cannot break. Pure."""

from __future__ import annotations

import re

__all__ = ["cell", "code", "fence"]


def fence(text: str, language: str = "") -> str:
    """A code block that `text` cannot break out of, whatever it holds."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}{language}\n{text.rstrip()}\n{marks}"


def cell(text: str) -> str:
    """Text for a table cell: one line, no column breaks."""
    return " ".join(text.split()).replace("|", "\\|")


def code(text: str) -> str:
    """Text as inline code, on one line."""
    line = " ".join(text.split())
    longest = max((len(run) for run in re.findall(r"`+", line)), default=0)
    marks = "`" * (longest + 1)
    return f"{marks} {line} {marks}" if longest else f"{marks}{line}{marks}"
