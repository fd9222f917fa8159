"""Excerpts of a server log for people: its start, first error, root traceback and end, redacted.

A log may be larger than memory, so it is searched in blocks and only a few parts are kept.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vllm_repro.journal.redact import Redactor

_CONTEXT = 1_024  # bytes before an error
_BLOCK, _OVERLAP = 1 << 20, 4_096
_ALIGN = 8_192  # how far to search for the end of a line
_MARGIN = 4_096  # cut from a partial line: half a key cannot be recognised
# characters kept of a line, and how many of them from its end
_LONGEST_LINE, _LINE_END = 2_000, 400
_SEARCHED = 128 << 20  # bytes searched at each end of a log

_ALARM = re.compile(
    # Only at the start of a line: a warning of every boot quotes an exception in the middle.
    rb"\b(?:ERROR|CRITICAL|FATAL)\b|Traceback \(most recent call last\)|Fatal Python"
    rb" error|Segmentation fault"
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
"""Pattern of a first error."""


@dataclass(frozen=True, kw_only=True)
class ExcerptSizes:
    """Bytes to read of each part of a log."""

    # at the start
    head: int
    # from the first error on
    error: int
    # around the root exception
    root: int
    # most bytes before the root exception, if its traceback begins there
    traceback: int
    # at the end
    tail: int
    # a log up to this size is one excerpt
    whole: int = 0


PAGE_SIZES = ExcerptSizes(
    head=32_768, error=81_920, root=65_536, traceback=48_000, tail=65_536, whole=262_144
)


@dataclass(frozen=True, kw_only=True)
class Excerpt:
    """Part of a log, in whole lines if possible."""

    text: str
    # bytes left out before it
    before: int


@dataclass(frozen=True, kw_only=True)
class LogExcerpts:
    """Excerpts of one server log, in the order of the log."""

    # relative to the run's folder
    name: str
    # bytes of the whole log
    size: int
    excerpts: tuple[Excerpt, ...]


def read_excerpts(
    folder: Path, name: str, redactor: Redactor, root: str | None, sizes: ExcerptSizes = PAGE_SIZES
) -> LogExcerpts | None:
    """Return the excerpts of `folder/name`; None if it cannot be read, or is outside the folder.

    root: exception that the engine died of. Its traceback is kept even if other errors came first.
    """
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        return None  # a foreign journal must not open other files
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            excerpts: list[Excerpt] = []
            at = 0
            for first, last in _ranges(file, size, root, sizes):
                first, last = _at_line_ends(file, max(at, first), min(last, size), size)
                first = max(at, first)
                if first < last:
                    text = _read_redacted(file, first, last, size, redactor)
                    excerpts.append(Excerpt(text=text, before=first - at))
                    at = last
    except OSError:
        return None
    return LogExcerpts(name=name, size=size, excerpts=tuple(excerpts))


def _ranges(
    file: BinaryIO, size: int, root: str | None, sizes: ExcerptSizes
) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of a log to keep, in order: first byte, and byte after the last.

    They may overlap, be empty, or pass the log's ends.
    """
    if size <= sizes.whole:
        yield 0, size
        return
    alarm = _find(file, _ALARM, _ALARM_WORDS, size)
    first_error = size if alarm is None else _at_line_ends(file, alarm, size, size)[0]
    context = max(0, first_error - _CONTEXT)
    yield 0, min(sizes.head, context)
    if alarm is not None:
        end = first_error + sizes.error
        yield context, first_error
        yield first_error, end
        # a foreign journal may hold text that cannot be encoded
        name = (root or "").encode("utf-8", "replace")
        raised = (
            _find(file, re.compile(rb"\b" + re.escape(name) + rb"\b(?!')"), (name,), size)
            if name
            else None
        )
        if raised is not None:
            near = max(0, raised - sizes.root // 2)
            begin = _traceback_before(file, raised, sizes.traceback)
            yield max(near if begin is None else begin, end), max(near, begin or 0) + sizes.root
    yield size - sizes.tail, size


def _find(
    file: BinaryIO, pattern: re.Pattern[bytes], words: Sequence[bytes], size: int
) -> int | None:
    """Return the offset in bytes of the first match in a log, or None.

    Only the first and the last `_SEARCHED` bytes are searched. words: every match contains one of
    them. Searching for them first is a hundred times faster. size: of the log.
    """
    at = 0
    while at < size:
        if _SEARCHED <= at < size - _SEARCHED:
            at = size - _SEARCHED
        file.seek(at)
        block = file.read(_BLOCK)
        if any(word in block for word in words) and (match := pattern.search(block)):
            return at + match.start()
        if len(block) < _BLOCK:
            return None
        at += _BLOCK - _OVERLAP
    return None


def _traceback_before(file: BinaryIO, at: int, most: int) -> int | None:
    """Return where the last traceback begins in the `most` bytes before `at`; None without one."""
    first = max(0, at - most)
    file.seek(first)
    before = file.read(at - first).rfind(b"Traceback (most recent call last)")
    return None if before < 0 else first + before


def _at_line_ends(file: BinaryIO, first: int, last: int, size: int) -> tuple[int, int]:
    """Return `first` and `last`, each moved back to a line end if one is within 8,192 bytes.

    size: of the log.
    """
    if 0 < first < size:
        before = _newline_before(file, first, 0)
        first = before if before is not None else first
    if first < last < size:
        last = _newline_before(file, last, first) or last
    return first, last


def _newline_before(file: BinaryIO, at: int, least: int) -> int | None:
    """Return the offset after the last line end before `at`; 0 if `at` is in the first line.

    None if it is below `least`, or more than 8,192 bytes away.
    """
    near = max(least, at - _ALIGN)
    file.seek(near)
    newline = file.read(at - near).rfind(b"\n")
    return near + newline + 1 if newline >= 0 or near == 0 else None


def _read_redacted(file: BinaryIO, first: int, last: int, size: int, redactor: Redactor) -> str:
    """Return a byte range of a log as redacted text, without what may be half a secret.

    A partial first or last line loses 4,096 characters at the cut. Long lines lose their middle.
    """
    file.seek(max(0, first - 1))
    raw = file.read(last - max(0, first - 1))
    begins = first == 0 or raw[:1] == b"\n"
    raw = raw[min(first, 1) :]
    ends = last >= size or raw.endswith(b"\n")
    lines = redactor.text(raw.decode("utf-8", "replace")).split("\n")
    if not begins:
        lines[0] = lines[0][_MARGIN:]
        # Redact again: the rest of a key of several lines is recognised only at the start of a
        # text.
        lines = redactor.text("\n".join(lines)).split("\n")
    if not ends:
        lines[-1] = lines[-1][: max(0, len(lines[-1]) - _MARGIN)]
    return "\n".join(map(_short_line, lines))


def _short_line(line: str) -> str:
    """Return a line with its middle left out and counted, if it is over 2,000 characters long."""
    over = len(line) - _LONGEST_LINE
    if over <= 0:
        return line
    return (
        f"{line[: _LONGEST_LINE - _LINE_END]} [… {over:,} more characters in this line …]"
        f" {line[-_LINE_END:]}"
    )
