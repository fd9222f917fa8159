"""Runs of access lines and token counts, skipped in blocks: they are most of a long log.

Only their number, their times and the last lines count. A line is skipped only if a line
of the same kind came just before it, and changed nothing that the next line does not change too.
Once the diagnosis is certain, only lines with certain words are read.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from io import BufferedReader

_BLOCK = 1 << 22
_MOST = 256
"""Most kinds: two for each API server, a third for each engine."""
_TIME = r"\d\d-\d\d \d\d:\d\d:\d\d"
_ACCESS = (
    r'\d{1,3}(?:\.\d{1,3}){3}:\d{1,5} - "(?:GET|POST) /[A-Za-z0-9_./-]{0,200} HTTP/1\.[01]" 200 OK'
)
# Requests without a new token are not skipped: they may be a hang.
_COUNTS = (
    r"Avg prompt throughput: \d{1,9}\.\d tokens/s, Avg generation throughput: "
    r"(?:(?!0+\.0 )\d{1,9}\.\d tokens/s, Running: \d{1,6} reqs, Waiting: \d{1,6} reqs"
    r"|0\.0 tokens/s, Running: 0 reqs, Waiting: 0 reqs)"
    r", GPU KV cache usage: \d{1,3}\.\d%, Prefix cache hit rate: \d{1,3}\.\d%"
    r"(?:, MM cache hit rate: \d{1,3}\.\d%)?"
)
_PROCESS = r"(?:\([A-Za-z]\w{0,40} pid=\d{1,10}\) )?"
# The stamps of `log_text._COLLECTORS`, in ASCII: of docker -t, Kubernetes, journald and syslog.
_COLLECTOR = (
    r"(?>\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?[ \t]?"
    r"(?:(?:stdout|stderr) [FP] |[\w.-]{1,80} [\w./@-]{1,80}\[\d{1,10}\]: ?)?"
    r"|[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})? [!-~]{1,80} "
    r"[\w./@-]{1,80}(?:\[\d{1,10}\])?: ?)?+"
)
_LINE = re.compile(
    rf"{_COLLECTOR}(?:({_PROCESS}INFO: {{5}}){_ACCESS}"
    rf"|({_PROCESS}INFO ){_TIME}( \[loggers\.py:\d{{1,5}}\] Engine \d{{1,5}}: ){_COUNTS})",
    re.ASCII,
)
_STAMP = re.compile(
    rf"{_COLLECTOR}({_PROCESS}INFO )({_TIME})( \[loggers\.py:\d+\] Engine \d+: )".encode()
)


class AccessRuns:
    """Reader of a log file that skips long runs of access lines and token counts."""

    def __init__(self) -> None:
        # lines skipped in runs so far, and those of them with a time; `only` counts none
        self.lines = self.stamped = 0
        # skipped lines since the caller last reset both, and (kind, time) of their token counts
        self.dropped = 0
        self.stamps: list[tuple[str, str]] = []
        # nothing may be skipped; `read_lines` clears it
        self.off = True
        # words of the lines that still count; None if all lines count
        self.only: Sequence[bytes] | None = None
        self._kinds: Sequence[str] = ()

    def skip(self, kinds: Collection[str]) -> None:
        """Skip runs of lines of these kinds (see `kind_of`, at most 256) until the next call."""
        self._kinds = sorted(kinds)[:_MOST]

    def read(self, file: BufferedReader, longest: int) -> Iterator[bytes]:
        """Yield the lines of `file` that are not skipped, each cut at `longest` bytes.

        Add the skipped ones to `lines`, `stamped`, `dropped` and `stamps`.
        """
        block, at, whole = b"", 0, True
        while True:
            if self.only is not None and not self.off and (last := block.rfind(b"\n", at) + 1) > at:
                yield from self._lines_with_words(block[at:last])
                at = last
                continue
            if (
                self._kinds
                and not self.off
                and (run := _pattern(tuple(self._kinds)).match(block, at))
            ):
                yield from self._run(block, at, run.end())
                at = run.end()
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

    def _lines_with_words(self, text: bytes) -> Iterator[bytes]:
        """Yield the lines of `text`, which ends with a newline, that hold a word in `self.only`."""
        starts = set()
        for word in self.only or ():
            place = -1
            while (place := text.find(word, place + 1)) >= 0:
                starts.add(_start(text, 0, place))
        for start in sorted(starts):
            yield text[start : text.index(b"\n", start) + 1]

    def _run(self, block: bytes, begin: int, end: int) -> Iterator[bytes]:
        """Yield the lines in `block[begin:end]` that still count: the last ones of each kind.

        Add the others to the counts of skipped lines.
        """
        stamps = list(_stamps(block, begin, end))
        kept = {_start(block, begin, end - 1), *{kind: start for start, kind, _ in stamps}.values()}
        marks = [  # three answers in a row prove that a server survived an error
            (b'"POST ', 3),
            (b" /health", 3),
            *((kind.encode(), 1) for kind in self._kinds if "\0" not in kind),
        ]
        for mark, number in marks:
            place = end
            for _ in range(number):
                if (place := block.rfind(mark, begin, place)) < 0:
                    break
                kept.add(_start(block, begin, place))
        stamps.reverse()
        for start in sorted(kept):
            count = block.count(b"\n", begin, start)
            self.lines += count
            self.dropped += count
            while stamps and stamps[-1][0] < start:
                self.stamps.append(stamps.pop()[1:])
                self.stamped += 1
            begin = block.index(b"\n", start) + 1
            if stamps and stamps[-1][0] == start:
                stamps.pop()  # the caller reads this line
            yield block[start:begin]


def kind_of(raw: str) -> str | None:
    """Return the kind of an access line or token count; None for other lines.

    Lines of one kind in a row need not be read. The kind is the line's beginning, up to its first
    number that changes; in a token count a zero character stands for the time.
    """
    if not raw.endswith(("OK", "%")) or (match := _LINE.fullmatch(raw)) is None:
        return None
    return match[1] or f"{match[2]}\0{match[3]}"


def _start(block: bytes, begin: int, place: int) -> int:
    """Return the index at which the line that holds index `place` begins; not before `begin`."""
    return block.rfind(b"\n", begin, place) + 1 or begin


def _stamps(block: bytes, begin: int, end: int) -> Iterator[tuple[int, str, str]]:
    """Yield (index of its start, kind, time) of each throughput line in `block[begin:end]`."""
    place = begin
    while (place := block.find(b" Engine ", place, end)) >= 0:
        start = _start(block, begin, place)
        if match := _STAMP.match(block, start):
            yield start, f"{match[1].decode()}\0{match[3].decode()}", match[2].decode()
        place += 1


@cache
def _pattern(kinds: tuple[str, ...]) -> re.Pattern[bytes]:
    """Return a pattern that matches a run of lines of these kinds.

    It is possessive: the search must not try another way for any of a million lines.
    """
    starts = [re.escape(kind).replace("\0", _TIME) for kind in kinds]
    lines = [
        start + (_COUNTS if "\0" in kind else _ACCESS)
        for start, kind in zip(starts, kinds, strict=True)
    ]
    return re.compile(rf"(?:{_COLLECTOR}(?:{'|'.join(lines)})\r?\n)++".encode())
