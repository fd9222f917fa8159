"""What somebody hands over as a log, as the lines that the server wrote.

On the way from a server to a file the bytes become UTF-16, the ends of the lines become carriage returns or get
lost, each line becomes a record of JSON, and a terminal breaks what is too long for it. All of that is undone
here, before anything is read: it is about lines, and knows nothing of what they say but how vLLM's begin.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from vllm_repro.diagnosis.log_prefix import STAMPED

__all__ = ["MAX_LINE", "physical_lines"]

MAX_LINE = 1 << 20
"""Longest line kept, in characters. A scheduler dump with long block lists fits; a runaway line does not fill
the memory.
"""

_AHEAD = 400
"""Lines by whose lengths it is seen that something broke the longer ones."""


def physical_lines(source: str | bytes | Iterable[str | bytes]) -> Iterator[str]:
    """The lines of `source`: the whole text, or an iterable of it in pieces that each hold one line or more, as an open file is one.

    Bytes are read as UTF-8, or as UTF-16 where they begin with its mark, as PowerShell writes what is redirected;
    what is not valid becomes U+FFFD.
    """
    if isinstance(source, str | bytes):
        pieces: Iterable[str | bytes] = (source,)
    else:
        pieces = _bounded(source) if isinstance(source, io.IOBase) else source
    return _parted(_rejoined(_recorded(_split(_texts(pieces)))))


def _bounded(file: io.IOBase) -> Iterator[str | bytes]:
    """A file in pieces of at most `MAX_LINE`; of a longer line the beginning only, unless carriage returns part it."""
    whole = True
    while piece := file.readline(MAX_LINE):
        carriage = b"\r" if isinstance(piece, bytes) else "\r"
        if whole or carriage in piece:
            yield piece
        whole = piece.endswith(b"\n" if isinstance(piece, bytes) else "\n")


def _texts(pieces: Iterable[str | bytes]) -> Iterator[str]:
    rest = iter(pieces)
    first = next(rest, b"")
    if isinstance(first, bytes) and first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        # All in one, since its lines do not end at a byte.
        whole = b"".join([first, *(piece for piece in rest if isinstance(piece, bytes))])
        first, rest = whole.decode("utf-16", "replace"), iter(())
    texts = (
        piece.decode("utf-8", "replace") if isinstance(piece, bytes) else piece
        for piece in chain((first.removeprefix(codecs.BOM_UTF8) if isinstance(first, bytes) else first,), rest)
    )
    opening = next(texts).removeprefix("\ufeff")
    if "\r" in opening and "\n" not in opening:  # the ends of the lines themselves; a progress bar has both
        yield from _from_carriage_returns(chain((opening,), texts))
    else:
        yield from chain((opening,), texts)


def _from_carriage_returns(texts: Iterable[str]) -> Iterator[str]:
    held = ""
    for text in texts:
        lines, end, held = (held + text).rpartition("\r")
        if end:
            yield lines.replace("\r", "\n")
        held = held[:MAX_LINE]
    yield held


def _split(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        start = 0
        while start < len(text):
            end = text.find("\n", start)
            if end < 0:
                end = len(text)
            yield text[start : min(end, start + MAX_LINE)]
            start = end + 1


# ── records of JSON ───────────────────────────────────────────────────────────────────────────────────────

# Docker, Loki, CloudWatch and fluentd, journald, structured loggers, Google Cloud
_KEYS = ("log", "line", "message", "MESSAGE", "msg", "textPayload")
_PRETTY = re.compile(rf'\s+"(?:{"|".join(_KEYS)})": ("(?:[^"\\]|\\.)*"),?\s*')
_PRETTY_REST = re.compile(r'\s*(?:[\[\]{}]{1,2},?|"[^"]*": .*)\s*')


def _recorded(lines: Iterable[str]) -> Iterator[str]:
    """The lines inside records: one record a line, or an array of them printed with indentation."""
    pretty = None
    for line in lines:
        if pretty is None and line.strip():
            pretty = line.strip() in ("[", "{", "[{")
        if line.startswith("{") and len(line) > 2:
            yield from _from_record(line)
        elif not pretty:
            yield line
        elif found := _PRETTY.fullmatch(line):
            yield from _lines_of(json.loads(found[1], strict=False))
        elif not _PRETTY_REST.fullmatch(line):
            yield line


def _from_record(line: str) -> list[str]:
    """The record itself where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return [line]
    for key in _KEYS:
        text = record.get(key) if isinstance(record, dict) else None
        if isinstance(text, str):
            return _lines_of(text)
        # journald gives the bytes of what has colours in it
        if isinstance(text, list) and text and all(isinstance(byte, int) and 0 <= byte < 256 for byte in text):
            return _lines_of(bytes(text).decode("utf-8", "replace"))
    return [line]


def _lines_of(text: str) -> list[str]:
    return text.rstrip("\r\n").split("\n")


# ── lines that were broken, and ends that were lost ───────────────────────────────────────────────────────


def _rejoined(lines: Iterable[str]) -> Iterator[str]:
    """Lines that a terminal broke at its width, in one again."""
    rest = iter(lines)
    ahead = list(islice(rest, _AHEAD))
    width = _width(ahead)
    if width is None:
        yield from chain(ahead, rest)
        return
    held = ""
    for line in chain(ahead, rest):
        if held and (_begins(line) or len(held) > MAX_LINE):
            yield held
            held = ""
        held += line
        if len(line) < width:
            yield held
            held = ""
    if held:
        yield held


def _width(lines: list[str]) -> int | None:
    """At which width something broke them: the longest have one length, and what follows them does not begin like a line."""
    width = max(map(len, lines), default=0)
    full = [at for at, line in enumerate(lines[:-1]) if len(line) == width]
    stamped = sum(1 for at in full if _begins(lines[at]))
    broken = sum(1 for at in full if not _begins(lines[at + 1]))
    enough = stamped >= 3 and len(full) * 10 >= len(lines) and broken * 4 >= len(full) * 3
    return width if 40 <= width <= 400 and enough else None


def _begins(line: str) -> bool:
    return STAMPED.match(line) is not None or line.startswith(("INFO:     ", "WARNING:  ", "ERROR:    "))


_LOST = 5
"""Stamps in one line from which on it is several; fewer may be a message that quotes a log."""


def _parted(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a text whose ends were lost, or written out as `\\n`: it is hardly more than one line as a whole."""
    rest = iter(lines)
    ahead = list(islice(rest, 4))
    if len(ahead) == 4:
        yield from chain(ahead, rest)
        return
    for line in ahead:
        starts = [found.start() for found in STAMPED.finditer(line)]
        if len(starts) < _LOST:
            yield line
        elif "\\n(" in line:
            yield from line.split("\\n")
        else:
            for start, end in zip([0, *starts], [*starts, len(line)], strict=True):
                if piece := line[start:end].rstrip():
                    yield piece
