"""Prefixes of unknown log collectors, learnt from lines on which vLLM's own prefix follows.

Slurm writes `0: `, stern `pod container `, `cat -n` a number, and there are more than can be
listed. vLLM's `(APIServer pid=9) INFO 11-20 08:24:30` marks where such a prefix ends. Its pattern
is learnt there and removed from lines that lack vLLM's prefix: uvicorn's, and lines of tracebacks.
"""

from __future__ import annotations

import re
from collections import Counter

_LONGEST = 240
_ENOUGH = 2
"""Lines with the same pattern before it counts.

A single line may be a progress bar, or a sentence that quotes a log.
"""
_MANY = 32
"""Most patterns kept; a log of many pods has a few."""

_STAMP = re.compile(
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d[ .,]"
)
_OWN = r"(?:\([A-Za-z][\w.:-]{0,60}(?: [\w= ]{1,20})? pid=\d{1,10}(?:, ip=[^)\s]{1,60})?\) ?)"
"""The prefix that vLLM gives a process."""
_TRACEBACK = re.compile(
    rf"{_OWN}*(?:Traceback \(most recent call last\):|  File \"[^\"\n]+\", line \d+, in )"
)
"""The beginning of a line of a traceback, which has the prefix too if the log has nothing else."""
_UVICORN = re.compile(_OWN + r"*(?:DEBUG|INFO|WARNING|ERROR|CRITICAL): {4,8}\S")
_NO_PREFIX = re.compile(
    r".*(?:pid=\d|\b(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL)\b|\[rank\d|\{|(?<!\])[:.] $)"
)
"""A prefix of vLLM or of a logger, JSON, or a sentence before a traceback."""
_STAMPED = re.compile(_OWN + "*" + _STAMP.pattern)
"""The beginning of a line of vLLM's logger."""
_VARIES = re.compile(r"([0-9a-f]{12,}|\d+)|(\s+)")


class Prefixes:
    """Prefixes of log collectors such as Slurm, learnt from the lines so far, to cut them off.

    No prefix is removed while most vLLM lines come without any: text before the other lines is then
    a progress bar or a message.
    """

    def __init__(self) -> None:
        self._bare = 0
        self._prefixed = 0
        self._seen: Counter[str] = Counter()
        self._patterns: dict[str, re.Pattern[str]] = {}

    def learn(self, raw: str, at: int) -> None:
        """Learn the prefix that stands before vLLM's own in one line, from index `at` on.

        It counts from the second such line on.
        """
        if _STAMPED.match(raw, at):
            self._bare += 1
            return
        if _STAMP.search(raw, at, at + _LONGEST):  # cheaper, and nearly every line has none
            stamp = _STAMPED.search(raw, at, at + _LONGEST)
        elif ' File "' in raw or "Traceback (" in raw:
            stamp = _TRACEBACK.search(raw, at, at + _LONGEST)
        elif ":     " in raw:
            stamp = _UVICORN.search(raw, at, at + _LONGEST)
        else:
            return
        if stamp is None or (prefix := raw[at : stamp.start()]).isspace() or not prefix:
            return
        if stamp.re is not _STAMPED and stamp[0][0] != "(" and _NO_PREFIX.match(prefix):
            return
        self._prefixed += 1
        pattern = _pattern(prefix)
        if pattern in self._patterns or len(self._seen) > _MANY * _MANY:
            return
        self._seen[pattern] += 1
        if (
            self._seen[pattern] >= (1 if prefix == "| " else _ENOUGH)
            and len(self._patterns) < _MANY
        ):
            self._patterns[pattern] = re.compile(pattern)

    def learn_bare(self, count: int) -> None:
        """Count lines of vLLM that came without a collector's prefix."""
        self._bare += count

    @property
    def mostly_prefixed(self) -> bool:
        """Return True if more of vLLM's lines so far have a collector's prefix than have none."""
        return self._prefixed > self._bare

    def end(self, raw: str, at: int) -> int:
        """Return the index after the learnt prefix of this line; `at` if none is to be removed."""
        if self.mostly_prefixed:
            for pattern in self._patterns.values():
                if match := pattern.match(raw, at):
                    return match.end()
        return at


def _pattern(prefix: str) -> str:
    """Return a regular expression of a prefix, in which its numbers and blanks may vary.

    Blanks at the end are exact: indentation follows them.
    """
    body = prefix.rstrip()
    parts, at = [], 0
    for varying in _VARIES.finditer(body):
        parts.append(re.escape(body[at : varying.start()]))
        if varying[1]:
            parts.append(r"\d+" if varying[1].isdigit() else "[0-9a-f]+")
        else:
            parts.append(r"\s*" if varying.start() == 0 else r"\s+")
        at = varying.end()
    # A right-aligned number begins with blanks on some lines only. An empty line has lost the
    # blanks at its end.
    start = "" if body[:1].isspace() else r"\s*"
    end = rf"(?:{re.escape(prefix[len(body) :])}|\s*$)"
    return f"{start}{''.join(parts)}{re.escape(body[at:])}{end}"
