"""Runs of access lines, of which a long log mostly consists: skipped in blocks, because only their number and last lines count.

A line is skipped only if a line with the same prefix came just before it and changed nothing but what the next one changes too.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from io import BufferedReader

__all__ = ["AccessRuns", "prefix_of"]

_BLOCK = 1 << 22
_MOST = 64
"""Most prefixes: one for each API server."""
_REST = r'\d{1,3}(?:\.\d{1,3}){3}:\d{1,5} - "(?:GET|POST) /[A-Za-z0-9_./-]{0,200} HTTP/1\.[01]" 200 OK'
_LINE = re.compile(rf"((?:\([A-Za-z]\w{{0,40}} pid=\d{{1,10}}\) )?INFO: {{5}}){_REST}")


class AccessRuns:
    """Reader of a binary file that skips runs of access lines.

    lines: number of those skipped so far. dropped: number of those not yet counted by the caller. off: nothing may be skipped.
    """

    def __init__(self) -> None:
        self.lines = self.dropped = 0
        self.off = True
        self._prefixes: Sequence[str] = ()
        self._pattern: re.Pattern[bytes] | None = None

    def skip(self, prefixes: Collection[str]) -> None:
        """Skip access lines with these prefixes, from the next line to the first other one."""
        self._prefixes = sorted(prefixes)[:_MOST]
        self._pattern = _pattern(tuple(self._prefixes))

    def read(self, file: BufferedReader, longest: int) -> Iterator[bytes]:
        """Yield the lines of `file` that are not skipped, each cut at `longest` bytes."""
        block, at, whole = b"", 0, True
        while True:
            if self._pattern is not None and not self.off and (run := self._pattern.match(block, at)):
                for start, end in _kept(block, at, run.end(), self._prefixes):
                    self._skip(block.count(b"\n", at, start))
                    yield block[start:end]
                    at = end
                continue
            end = block.find(b"\n", at) + 1
            if not end and len(block) - at < longest and (more := file.read(_BLOCK)):
                block, at = block[at:] + more, 0
                continue
            end = end or len(block)
            if at == end:
                if not (block := file.read(_BLOCK)):
                    return
                at = 0
                continue
            if whole:
                yield block[at : min(end, at + longest)]
            whole = block.endswith(b"\n", at, end)
            at = end

    def _skip(self, count: int) -> None:
        self.lines += count
        self.dropped += count


def prefix_of(raw: str) -> str | None:
    """Return the prefix of an access line; None for any other line."""
    found = _LINE.fullmatch(raw) if raw.endswith('" 200 OK') else None
    return found and found[1]


@cache
def _pattern(prefixes: tuple[str, ...]) -> re.Pattern[bytes] | None:
    # Possessive: a run of a million lines must not remember where each began.
    starts = "|".join(map(re.escape, prefixes))
    return re.compile(rf"(?:(?:{starts}){_REST}\r?\n)++".encode()) if prefixes else None


def _kept(block: bytes, begin: int, end: int, prefixes: Sequence[str]) -> list[tuple[int, int]]:
    """Return the lines of a run to read: the last of each process, the last three answers of each kind, and the last."""
    marks = [(b'"POST ', 3), (b" /health", 3), *((prefix.encode(), 1) for prefix in prefixes)]
    starts = {block.rfind(b"\n", begin, end - 1) + 1 or begin}
    for mark, number in marks:
        place = end
        for _ in range(number):
            place = block.rfind(mark, begin, place)
            if place < 0:
                break
            starts.add(max(block.rfind(b"\n", begin, place) + 1, begin))
    return [(start, block.index(b"\n", start) + 1) for start in sorted(starts)]
