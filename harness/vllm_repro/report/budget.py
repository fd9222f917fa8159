"""Text held to a size: GitHub takes 65,536 characters, and does not say everywhere whether it means letters or bytes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_repro.journal.log_excerpts import Keep, LogPieces
from vllm_repro.report.escape import printable

__all__ = ["LIMIT", "excerpt", "fits", "fitted", "held", "size"]

LIMIT = 65_536

_LEAST = 48
"""Bytes below which a piece of a text says nothing any more."""


def size(text: str) -> int:
    """In bytes of UTF-8, which are never fewer than the letters."""
    return len(text.encode("utf-8", "replace"))


def fits(text: str, limit: int = LIMIT) -> bool:
    return len(text) <= limit and size(text) <= limit


def held(text: str, limit: int) -> str:
    """`text` in at most `limit` bytes, its middle left out and counted."""
    if size(text) <= limit:
        return text
    room = limit - size(_gap(size(text)))
    if room < _LEAST:
        return ""
    return f"{_end(text, room // 2, Keep.START)}{_gap(size(text) - room)}{_end(text, room // 2, Keep.END)}"


def fitted(make: Callable[[int], str], limit: int) -> str:
    """The longest that `make` gives in at most `limit` bytes when it is asked for less and less; empty where nothing fits.

    What is made around a text (a fence, an escape for each sign) is known only when it is made.
    """
    asked = limit
    while asked >= _LEAST:
        text = make(asked)
        if size(text) <= limit:
            return text
        asked = min(asked * 7 // 8, asked - (size(text) - limit) // 8)
    return ""


def excerpt(log: LogPieces, limit: int) -> str:
    """The log in at most `limit` bytes: each piece keeps its better end, and what is left out is counted."""
    texts = [printable(piece.text).strip("\n") for piece in log.pieces]
    notes = (size(_gap(log.size)) + 2) * (len(texts) + 1)
    room = _rooms([size(text) for text in texts], [piece.share for piece in log.pieces], limit - notes)
    if room is None:
        return ""
    parts: list[str] = []
    left_out = 0
    for piece, text, most in zip(log.pieces, texts, room, strict=True):
        shown = _end(text, most, piece.keep, whole_lines=True)
        cut = size(text) - size(shown)
        left_out += piece.before + (cut if piece.keep is Keep.END else 0)
        if left_out:
            parts.append(_gap(left_out).strip())
        parts.append(shown.strip("\n"))
        left_out = cut if piece.keep is Keep.START else 0
    if left_out:
        parts.append(_gap(left_out).strip())
    return "\n".join(part for part in parts if part)


def _gap(left_out: int) -> str:
    return f" [… {left_out:,} bytes left out …] "


def _rooms(sizes: Sequence[int], shares: Sequence[int], limit: int) -> list[int] | None:
    """The room of each: what it needs, where its share is more; the rest goes to the others. None where there is none."""
    if limit < _LEAST:
        return None
    room = [0] * len(sizes)
    open_ = set(range(len(sizes)))
    while open_:
        total = sum(shares[at] for at in open_)
        small = {at for at in open_ if sizes[at] <= limit * shares[at] // total}
        if not small:
            for at in open_:
                room[at] = limit * shares[at] // total
            break
        for at in small:
            room[at] = sizes[at]
        limit -= sum(sizes[at] for at in small)
        open_ -= small
    return room


def _end(text: str, most: int, keep: Keep, *, whole_lines: bool = False) -> str:
    """The first or the last `most` bytes, with `whole_lines` without the part of a line at the cut, where another line is left."""
    data = text.encode("utf-8", "replace")
    if len(data) <= most:
        return text
    if keep is Keep.START:
        cut = data[:most].decode("utf-8", "ignore")
        return cut.rpartition("\n")[0] or cut if whole_lines else cut
    cut = data[len(data) - most :].decode("utf-8", "ignore")
    return cut.partition("\n")[2] or cut if whole_lines else cut
