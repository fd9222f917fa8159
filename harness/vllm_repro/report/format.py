"""Numbers, lists and columns as plain text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import TypeVar

_T = TypeVar("_T")


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s"


def plural(count: int, noun: str) -> str:
    """Return `1 run`, `2 runs`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def limited(texts: Sequence[str], most: int) -> list[str]:
    """Return the first `most` texts, and `and 7 more` if there are more."""
    more = len(texts) - most
    return [*texts[:most], f"and {more:,} more"] if more > 0 else list(texts)


def runs(values: Sequence[_T]) -> list[tuple[_T, int]]:
    """Return the runs of equal values, each with its length."""
    return [(value, len(list(run))) for value, run in groupby(values)]


def template_for(text: str, words: Collection[str]) -> str:
    """Return a template without the lines whose `#: some words` are not all in `words`."""
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


def columns(rows: Sequence[tuple[str, ...]], limits: Sequence[int]) -> list[str]:
    """Return the rows as lines of aligned columns, each at most `limits` letters wide."""
    short = [
        tuple(truncate(text, limit) for text, limit in zip(row, limits, strict=True))
        for row in rows
    ]
    widths = [max(len(row[column]) for row in short) for column in range(len(limits))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in short
    ]
