"""Numbers, lists and columns as plain text."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import TypeVar

_T = TypeVar("_T")


def seconds(value: float | None) -> str:
    """Return seconds as text: `2.5 s`, `12 s`, or `-` for an unknown time."""
    return "-" if value is None else f"{value:.{1 if value < 10 else 0}f} s"


def plural(count: int, noun: str) -> str:
    """Return `1 run`, `2 runs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def limited(texts: Sequence[str], most: int) -> list[str]:
    """Return the first `most` texts, then `and 7 more` if there are more."""
    more = len(texts) - most
    return [*texts[:most], f"and {more:,} more"] if more > 0 else list(texts)


def runs(values: Sequence[_T]) -> list[tuple[_T, int]]:
    """Return (value, length) of each run of equal neighbours."""
    return [(value, len(list(run))) for value, run in groupby(values)]


def template_for(text: str, words: Collection[str]) -> str:
    """Return `text` without the lines marked (`#: WORD`) with a word that is not in `words`.

    From the other lines, remove the marks.
    """
    lines = (line.partition("#: ") for line in text.splitlines())
    kept = [
        part.rstrip() if mark else part
        for part, mark, needs in lines
        if set(needs.split()) <= set(words)
    ]
    return "\n".join(kept) + "\n"


def truncate(text: str, limit: int) -> str:
    """Return at most `limit` letters of a text. A shortened text ends in an ellipsis."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def columns(rows: Sequence[tuple[str, ...]], limits: Sequence[int], most: int = 0) -> list[str]:
    """Return the rows as lines of aligned columns.

    limits: most letters of each column. most: letters of a line; the widest columns are shortened
    for it, but not below 8 letters. 0: no limit.
    """
    longest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths = [*map(min, longest, limits)]
    while most and sum(widths) + 2 * len(widths) - 2 > most and max(widths) > 8:
        widths[widths.index(max(widths))] -= 1
    return [
        "  ".join(
            truncate(text, width).ljust(width) for text, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def terminal_width() -> int:
    """Return the terminal's width in letters; 200 without a terminal."""
    return shutil.get_terminal_size((200, 24)).columns
