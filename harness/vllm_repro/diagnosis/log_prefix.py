"""The prefix that somebody's collector puts before every line, learnt from the lines on which vLLM's own follows it.

There are more collectors than can be listed (`0: ` of Slurm, `pod container ` of stern, `cat -n`, syslog's
`<14>1 … - - `), but what they write before one line has the shape of what they write before the next, and
vLLM's `(APIServer pid=9) INFO 11-20 08:24:30` says where it ends. So the shape is taken from there, and cut
from the lines that have nothing else to tell them by: uvicorn's, and those of a traceback.
"""

from __future__ import annotations

import re
from collections import Counter

__all__ = ["STAMPED", "Prefixes"]

_LONGEST = 240
_ENOUGH = 2
"""Lines with the same shape before vLLM's prefix; one alone may be a progress bar or a sentence that quotes a log."""
_MANY = 32
"""Shapes kept: a log of many pods has a few, and a log that needs more has none."""

STAMPED = re.compile(
    r"(?:\([A-Za-z][\w.:-]{0,60} pid=\d{1,10}(?:, ip=[^)\s]{1,60})?\) ?)*"
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d[ .,]"
)
"""How a line of vLLM's logging begins."""
_VARIES = re.compile(r"([0-9a-f]{12,}|\d+)|(\s+)")


class Prefixes:
    """What was learnt so far. Nothing is cut while most stamped lines come without a prefix: what stands before the others
    is a progress bar then, or a message.
    """

    def __init__(self) -> None:
        self._bare = 0
        self._dressed = 0
        self._seen: Counter[str] = Counter()
        self._shapes: dict[str, re.Pattern[str]] = {}

    def learn(self, raw: str, at: int) -> None:
        """Looks at one line, of which the prefixes that are known to everybody end at `at`."""
        if STAMPED.match(raw, at):
            self._bare += 1
            return
        found = STAMPED.search(raw, at, at + _LONGEST)
        if found is None:
            return
        self._dressed += 1
        shape = _shape(raw[at : found.start()])
        if shape in self._shapes or len(self._seen) > _MANY * _MANY:
            return
        self._seen[shape] += 1
        if self._seen[shape] >= _ENOUGH and len(self._shapes) < _MANY:
            self._shapes[shape] = re.compile(shape)

    def end(self, raw: str, at: int) -> int:
        """Where the learnt prefix of this line ends; `at` where it has none."""
        if self._dressed > self._bare:
            for shape in self._shapes.values():
                if found := shape.match(raw, at):
                    return found.end()
        return at


def _shape(prefix: str) -> str:
    """The pattern of a prefix: numbers and the room before them vary; the room at its end is exact, since indentation follows it."""
    body = prefix.rstrip()
    parts, at = [], 0
    for found in _VARIES.finditer(body):
        parts.append(re.escape(body[at : found.start()]))
        if found[1]:
            parts.append(r"\d+" if found[1].isdigit() else "[0-9a-f]+")
        else:
            parts.append(r"\s*" if found.start() == 0 else r"\s+")
        at = found.end()
    # A number that is right-aligned begins with room on some lines only; an empty line has lost the room at its end.
    start = "" if body[:1].isspace() else r"\s*"
    return f"{start}{''.join(parts)}{re.escape(body[at:])}(?:{re.escape(prefix[len(body) :])}|\\s*$)"
