"""A server log as lines: who said it, how loudly, and the words without the prefixes.

The same sentence reaches people in many dresses: printed by vLLM (`(EngineCore pid=9) ERROR 11-20 08:24:30
    [core.py:1138] …`), by uvicorn (`INFO:     …`), through compose (`vllm-1  | …`), `docker logs -t`,
    Kubernetes or journald, in colour, quoted or indented as a post has it, or glued behind a progress bar.
    Everything that reads a log reads it through here, so that no other module knows a prefix.

Reading is linear in the size of the log, and lazy but for the first lines, from which an unknown collector's
prefix is learnt; a single line is held to `MAX_LINE` characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from vllm_repro.diagnosis.log_lines import MAX_LINE, physical_lines
from vllm_repro.diagnosis.log_prefix import Prefixes

__all__ = ["ANSI", "MAX_LINE", "Line", "read_lines"]

_AHEAD = 400


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a log.

    number: counts from 1 in the log as given; pieces of a line that held carriage returns share it.
    process: name in vLLM's prefix (`EngineCore`, `EngineCore_DP0`, `Worker_TP1`, `APIServer`), "" where none
        is printed.
    pid: the one in that prefix. A worker changes its name while it boots, so lines belong together by pid,
        not by name.
    level: `INFO`, `ERROR`, …; "" for what was printed without one (a traceback at interpreter exit, a
        progress bar).
    source: file and line of the logging call (`core.py:1138`), "" where not printed.
    text: the message, its indentation kept. raw: the line as it came.
    """

    number: int
    process: str
    pid: int | None
    level: str
    source: str
    text: str
    raw: str

    @property
    def speaker(self) -> int | str:
        """What tells one process from another: its pid, else the name in the prefix, else ""."""
        return self.process if self.pid is None else self.pid


ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]_][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
"""Colours and cursor movement (CSI), titles, links and notes (OSC, APC), and the two-character escapes."""

# What stands for the escape where a log went through something that writes it out, and a colour that lost it altogether.
_ESC_IN_WORDS = re.compile(r"(?:\^\[|#033|\\(?:0?33|x1[bB]|u001[bB]|e)|\u241b)(?=\[[0-?]*[ -/]*[@-~])")
_NO_ESC = re.compile(r"\[\d{1,3}(?:;\d{1,3}){0,5}m(?!\])")

# What log collectors put before a line. Each is tried once and in this order, so that no message text is
# eaten.
_COLLECTORS = (
    # a quotation in Markdown or a mail
    re.compile(r"(?:> ?)+"),
    # a block of code in Markdown; where no prefix of vLLM follows, indentation is the text's own
    re.compile(
        r"[ \t]+(?=\([A-Za-z][\w.:-]{0,60} pid=\d|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)(?:: {4}| (?:\d{4}-)?\d\d-\d\d \d\d:))"
    ),
    # kubectl logs --prefix
    re.compile(r"\[pod/[\w.-]{1,253}/[\w.-]{1,63}\] ?"),
    # compose; the bar must stand before anything else, so that a table in a message is left alone
    re.compile(r"[A-Za-z0-9][\w.-]{0,80} +\| ?"),
    # docker -t, Kubernetes CRI ("… stdout F "), GitHub Actions, Grafana (a tab), journald with its ISO forms ("… host vllm[7]: ")
    re.compile(
        r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?[ \t]?"
        r"(?:(?:stdout|stderr) [FP] |[\w.-]{1,80} [\w./@-]{1,80}\[\d+\]: ?)?"
    ),
    # journald and syslog
    re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})? \S{1,80} [\w./@-]{1,80}(?:\[\d+\])?: ?"),
)

_PROCESS = re.compile(r"\(([A-Za-z][\w.:-]{0,60}) pid=(\d{1,10})(?:, ip=[^)\s]{1,60})?\) ?")
# torch puts the rank before what an uncaught exception prints, and launchers before everything
_RANK = re.compile(r"\[(rank\d{1,5})\]: ?")
_VLLM = re.compile(
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d{1,6})? "
    r"(?:\[([^\]\s]{1,160}:\d+)\]|([\w./-]{1,160}:\d+)\]) ?"
)
_UVICORN = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL|TRACE): {2,8}")

# A progress bar leaves no newline behind, so the next log line of any process may begin in the middle of one.
_GLUED = re.compile(
    r"(?<=\S)(?=\((?:APIServer|EngineCore|Worker|VllmWorker|MainProcess)[\w.:-]* pid=\d+\) "
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d )"
)


def read_lines(source: str | bytes | Iterable[str | bytes]) -> Iterator[Line]:
    """Yields the lines of a log, or of whatever was pasted.

    `source`: the whole text, or an iterable of it in pieces that each hold one line or more (an open file,
    text or binary). Lines that are empty after their prefix are kept: some
    messages have them.
    """
    prefixes = Prefixes()
    pieces = (
        (number, at, piece)
        for number, line in enumerate(physical_lines(source), start=1)
        for at, piece in _pieces(line)
    )
    # What a collector puts before each line is known before the first of them is read.
    ahead = list(islice(pieces, _AHEAD))
    for _, at, piece in ahead:
        prefixes.learn(piece, at)
    for count, (number, at, piece) in enumerate(chain(ahead, pieces)):
        if count >= len(ahead):
            prefixes.learn(piece, at)
        yield from _unglued(number, piece, prefixes.end(piece, at))


def _pieces(physical: str) -> Iterator[tuple[int, str]]:
    """What carriage returns part, each with where the prefixes of the known collectors end in it."""
    clean = _uncoloured(physical).replace("\xa0", " ").rstrip("\r")
    if "\r" not in clean:
        yield _collected(clean), clean
        return
    for piece in clean.split("\r"):
        if piece:
            yield _collected(piece), piece


def _uncoloured(text: str) -> str:
    if "[" in text:
        text = _ESC_IN_WORDS.sub("\x1b", text)
    if "\x1b" in text:
        text = ANSI.sub("", text)
    return _NO_ESC.sub("", text) if "m" in text and "[" in text else text


def _collected(piece: str) -> int:
    at = 0
    for collector in _COLLECTORS:
        if found := collector.match(piece, at):
            at = found.end()
    return at


def _unglued(number: int, piece: str, at: int) -> Iterator[Line]:
    line = _parse(number, piece, at)
    # Only a piece with no vLLM prefix of its own is cut: a message that quotes another log line stays whole.
    if line.level or " pid=" not in piece:
        yield line
        return
    cut = _GLUED.search(piece, at + 1)
    if cut is None:
        yield line
        return
    yield _parse(number, piece[: cut.start()], at)
    yield _parse(number, piece[cut.start() :], 0)


def _parse(number: int, raw: str, at: int) -> Line:
    process, pid = "", None
    # Ray puts its own before vLLM's, and a launcher the rank; the inner one is the speaker.
    while found := _PROCESS.match(raw, at) or _RANK.match(raw, at):
        process, pid, at = found[1], int(found[2]) if found.re is _PROCESS else None, found.end()
    level = source = ""
    if found := _VLLM.match(raw, at):
        level, source, at = found[1], found[2] or found[3], found.end()
    elif found := _UVICORN.match(raw, at):
        level, at = found[1], found.end()
    return Line(number, process, pid, level, source, raw[at:], raw)
