"""The parts of a server log that is read by people: its start, its first error, the root traceback, its end. Redacted, and read by seeking.

A log may be larger than the memory. It is searched in blocks, and no more of it is kept than a few windows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import BinaryIO

from vllm_repro.journal.redact import Redactor

__all__ = ["ALARM", "DRAFT", "PAGE", "Keep", "LogPieces", "Piece", "Windows", "read_pieces"]

_CONTEXT = 1_024  # before an error: what the engine did
_BLOCK, _OVERLAP = 1 << 20, 4_096
_ALIGN = 8_192  # how far the end of a line is looked for
_MARGIN = 4_096  # of a line that a window cuts: half a key has no shape any more
_LONGEST_LINE, _LINE_END = 2_000, 400  # letters of a line that stay, and how many of them are its last ones
_SEARCHED = 128 << 20  # bytes at each end of a log in which an error is looked for

_ALARM = re.compile(
    # An exception in the middle of a line is quoted: a warning of each boot's has one.
    rb"\b(?:ERROR|CRITICAL|FATAL)\b|Traceback \(most recent call last\)|Fatal Python error|Segmentation fault"
    rb"|^[\w.]*(?:Error|Exception)(?:: |$)",
    re.MULTILINE,
)
_ALARM_WORDS = (
    b"ERROR",
    b"CRITICAL",
    b"FATAL",
    b"Traceback (",
    b"Fatal Python",
    b"Segmentation",
    b"Error",
    b"Exception",
)
ALARM = re.compile(_ALARM.pattern.decode(), re.MULTILINE)
"""What a first error is told by, in text."""


@dataclass(frozen=True)
class Windows:
    """How much of a log is read, in bytes: at its start, from its first error on, around the root exception, at its end. A log of at most
    `whole` bytes is one piece."""

    head: int
    error: int
    root: int
    tail: int
    whole: int = 0


DRAFT = Windows(8_192, 32_768, 24_576, 24_576)
PAGE = Windows(32_768, 81_920, 65_536, 65_536, whole=262_144)


class Keep(Enum):
    """Which end of a piece stays when there is too little room."""

    START = "start"
    END = "end"


@dataclass(frozen=True)
class Piece:
    """Whole lines, where the log has lines. before: bytes of the log that are left out before it. share: of the room, beside the others."""

    text: str
    before: int
    keep: Keep
    share: int


@dataclass(frozen=True)
class LogPieces:
    """name: the file's, relative to the run's folder. size: of the whole log, in bytes."""

    name: str
    size: int
    pieces: tuple[Piece, ...]


def read_pieces(
    folder: Path, name: str, redactor: Redactor, root: str | None, windows: Windows = DRAFT
) -> LogPieces | None:
    """The pieces of `folder/name`; None where there is no such file, or where the name leads out of the folder.

    root: the exception that the engine died of, whose traceback is kept even where other errors came first.
    """
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        return None  # a journal from elsewhere must not have other files read into a draft
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return LogPieces(name, size, _pieces(file, size, redactor, root, windows))
    except OSError:
        return None


def _pieces(file: BinaryIO, size: int, redactor: Redactor, root: str | None, of: Windows) -> tuple[Piece, ...]:
    if size <= of.whole:
        return (Piece(_read(file, 0, size, size, redactor), 0, Keep.START, 1),) if size else ()
    alarm = _find(file, _ALARM, _ALARM_WORDS, size)
    # With what may not be encoded: a journal from elsewhere may name anything.
    name = None if root is None else root.encode("utf-8", "replace")
    raised = None if not name else _find(file, re.compile(rb"\b" + re.escape(name) + rb"\b(?!')"), (name,), size)
    first_error = size if alarm is None else _lines(file, alarm, size, size)[0]
    context = max(0, first_error - _CONTEXT)
    windows = [(0, min(of.head, context), Keep.START, 1)]
    if alarm is not None:
        windows.append((context, first_error, Keep.END, 1))
        windows.append((first_error, first_error + of.error, Keep.START, 4))
        if raised is not None:
            begin = _traceback_before(file, raised, of.root // 2)
            windows.append(
                (max(begin, first_error + of.error), max(begin, raised - of.root // 2) + of.root, Keep.START, 3)
            )
    windows.append((size - of.tail, size, Keep.END, 3))
    found: list[Piece] = []
    at = 0
    for first, last, keep, share in windows:
        first, last = _lines(file, max(at, first), min(last, size), size)
        first = max(at, first)
        if first >= last:
            continue
        found.append(Piece(_read(file, first, last, size, redactor), first - at, keep, share))
        at = last
    return tuple(found)


def _find(file: BinaryIO, pattern: re.Pattern[bytes], words: Sequence[bytes], size: int) -> int | None:
    """Where `pattern` is found first, in a log of more than twice `_SEARCHED` only in its first and last such part.

    words: one of them is in whatever the pattern finds. A word is looked for a hundred times faster.
    """
    at = 0
    while at < size:
        if _SEARCHED <= at < size - _SEARCHED:
            at = size - _SEARCHED
        file.seek(at)
        block = file.read(_BLOCK)
        if any(word in block for word in words) and (found := pattern.search(block)):
            return at + found.start()
        if len(block) < _BLOCK:
            return None
        at += _BLOCK - _OVERLAP
    return None


def _traceback_before(file: BinaryIO, at: int, most: int) -> int:
    first = max(0, at - most)
    file.seek(first)
    before = file.read(at - first).rfind(b"Traceback (most recent call last)")
    return at if before < 0 else first + before


def _lines(file: BinaryIO, first: int, last: int, size: int) -> tuple[int, int]:
    """The window moved to ends of lines, where these are near: back at its start, so that no error is cut, and back at its end."""
    if 0 < first < size:
        near = max(0, first - _ALIGN)
        file.seek(near)
        newline = file.read(first - near).rfind(b"\n")
        first = near + newline + 1 if newline >= 0 or near == 0 else first
    if first < last < size:
        near = max(first, last - _ALIGN)
        file.seek(near)
        newline = file.read(last - near).rfind(b"\n")
        last = near + newline + 1 if newline >= 0 else last
    return first, last


def _read(file: BinaryIO, first: int, last: int, size: int, redactor: Redactor) -> str:
    file.seek(max(0, first - 1))
    raw = file.read(last - max(0, first - 1))
    begins = first == 0 or raw[:1] == b"\n"
    raw = raw[min(first, 1) :]
    ends = last >= size or raw.endswith(b"\n")
    text = redactor.text(raw.decode("utf-8", "replace"))
    lines = text.split("\n")
    if not begins:
        lines[0] = lines[0][_MARGIN:]
        # Once more: with half of its first line gone, what is left of a key of several lines begins the text, and is known by that.
        lines = redactor.text("\n".join(lines)).split("\n")
    if not ends:
        lines[-1] = lines[-1][: max(0, len(lines[-1]) - _MARGIN)]
    return "\n".join(map(_short, lines))


def _short(line: str) -> str:
    left = len(line) - _LONGEST_LINE
    if left <= 0:
        return line
    return f"{line[: _LONGEST_LINE - _LINE_END]} [… {left:,} more characters in this line …] {line[-_LINE_END:]}"
