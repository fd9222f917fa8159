"""Reader of server logs: each line with its process, level and message, without the prefixes.

All other modules read logs through here, so only this module and `log_prefix` know a prefix: vLLM's
(`(EngineCore pid=9) ERROR 11-20 08:24:30 [core.py:1138] …`), uvicorn's (`INFO:     …`), prefixes of
compose, Docker, Kubernetes and journald, colours, JSON records, quotation marks and indentation of
a post.

Reading is lazy and linear in the size of the log. A line is cut at `MAX_LINE` characters.
"""

from __future__ import annotations

import ast
import csv
import html
import io
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice, pairwise
from typing import Any, NamedTuple

from vllm_repro_diagnosis.access_runs import AccessRuns
from vllm_repro_diagnosis.log_prefix import Prefixes

_LAST = 2**31
"""Sum of a line's number and of the one that it has if the lines are read from the end."""
MAX_LINE = 1 << 20
"""Longest line kept, in characters: a scheduler dump with long block lists fits."""

_SAMPLE = 80
"""First lines that show whether the text is a table, or wrapped."""
_COLUMNS = range(60, 401)
"""Widths of a terminal that wraps a log."""
_FEW = 2
"""Lines that may be indented as a part of a traceback; more of them are a block."""
_FULL = 3
"""Lines of a terminal's width, without a record below them, before a text counts as wrapped."""
_AHEAD = 400
"""Lines read before the first is returned, to learn the prefix of an unknown collector."""
_PART = 2**-20
"""Difference between the numbers of two log lines in one line of the file."""


class Line(NamedTuple):
    """One line of a log. A part that the line lacks is ""."""

    # in the file, from 1; a fraction orders the log lines in one line of the file
    number: float
    # the container that printed the line, in a log of several
    stream: str
    # name in vLLM's prefix: `EngineCore`, `EngineCore_DP0`, `Worker_TP1`, `APIServer`
    process: str
    # from that prefix; a worker changes its name while it boots, so group lines by pid
    pid: int | None
    # `INFO`, `ERROR`, …; a traceback printed at interpreter exit has none
    level: str
    # of vLLM's logger, such as `11-20 08:24:30`
    time: str
    # file and line of the logging call: `core.py:1138`
    source: str
    # the message with its indentation
    text: str
    # the line as read
    raw: str

    @property
    def speaker(self) -> int | str:
        """Return what identifies the line's process: its pid, else its name."""
        return self.process if self.pid is None else self.pid

    @property
    def of_vllm(self) -> bool:
        """Return True if the line has a prefix of vLLM or the name of one of its loggers."""
        return self.pid is not None or self.source[-1:].isdigit() or "vllm" in self.source

    @property
    def has_other_format(self) -> bool:
        """Return True for a format unlike vLLM's, whose prefix only a record's first line has."""
        return bool(self.source) and not self.source[-1:].isdigit()

    @property
    def stamp(self) -> str:
        """Return the time of vLLM's logger, else the first time of day in the line's prefix."""
        match = None if self.time else _STAMP.search(self.raw, 0, 120)
        return match[0] if match else self.time


ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]_][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
"""Colours and cursor movement (CSI), titles, links and notes (OSC, APC), two-character escapes."""

# An escape that a collector wrote out, and a colour without its escape, as GitHub shows it.
_WRITTEN_ESC = re.compile(
    r"(?:\^\[|#033|\\(?:0?33|x1[bB]|u001[bB]|e)|\u241b)(?=\[[0-?]*[ -/]*[@-~])"
)
_WRITTEN_MARKS = ("\\", "^[", "#033", "\u241b")
_NO_ESC = re.compile(r"\[\d{1,3}(?:;\d{1,3}){0,5}m(?!\])")

_REPEATED = re.compile(r" \[repeated \d+x across cluster\].*")
"""Ray's note on a line that several of its processes print."""

_STAMP = re.compile(r"(?:\d{4}[-/]\d\d[-/]\d\d[T ]|[A-Z][a-z]{2} [ \d]\d |\b)\d\d:\d\d:\d\d\b")

# Prefixes of known collectors. Each is tried once, in this order.
_COLLECTORS = (
    # a terminal's echo of Ctrl-C
    re.compile(r"(?:\^C)+"),
    # an exception in pytest's report
    re.compile(r"E(?: {3}|$)"),
    # an indented block, or code in a sentence; without a prefix of vLLM behind it, indentation
    # belongs to the message
    re.compile(
        r"[ \t`]+(?=\([A-Za-z][\w.:-]{0,60}(?: [\w=]{1,12})? pid=\d"
        r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)(?:: {4}| (?:\d{4}-)?\d\d-\d\d \d\d:))"
    ),
    # kubectl logs --prefix
    re.compile(r"\[(?P<stream>pod/[\w.-]{1,253}/[\w.-]{1,63})\] ?"),
    # compose, and its line when a container ends
    re.compile(r"(?P<stream>[A-Za-z0-9][\w.-]{0,80})(?: +\| ?| (?=exited with code \d))"),
    # docker -t, Kubernetes CRI ("… stdout F "), GitHub Actions, Grafana (a tab), journald with its
    # ISO forms ("… host vllm[7]: ")
    re.compile(
        r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?\]?[ \t]?"
        r"(?:(?:stdout|stderr) [FP] |[\w.-]{1,80} [\w./@-]{1,80}\[\d+\]: ?)?"
    ),
    # journald and syslog
    re.compile(
        r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})? (?!Process)\S{0,79}[^\s:] "
        r"[\w./@-]{1,80}(?:\[\d+\])?: ?"
    ),
    # Open MPI's rank, behind the words of its launcher
    re.compile(r"(?:[\w :-]{1,80}: )?\[\d+,\d+\]<std(?:out|err)>: ?"),
    # `ts` of moreutils
    re.compile(r"[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d(?:\.\d{1,9})? "),
    # an exception in pytest's report, as a CI stamps it
    re.compile(r"E {3,}"),
)

# with a rank: 0.7 to 0.10; without a pid: shortened by a reporter
_PROCESS = re.compile(
    r"\((?:([A-Za-z][\w.:-]{0,60})(?: rank=\d{1,5}|(?: [A-Z]{2}\d{1,5})+)? pid=(\d{1,10})"
    r"(?:, ip=[^)\s]{1,60})?"
    r"|((?:A(?:PI|pi)Server|(?:DP)?EngineCore|Worker)\w{0,60}))\) ?"
    # torch puts the rank before an uncaught exception, and launchers before every line
    r"|\[(rank\d{1,5})\]: ?"
)
_VLLM = re.compile(
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"(?:((?:\d{4}-)?\d\d-\d\d \d\d:\d\d:\d\d)(?:[.,]\d{1,6})? )?"
    r"(?:\\?\[([^\]\s]{1,160}:\d+)[\[\\]?\]|([\w./-]{1,160}:\d+)\]) ?"
)
_TORCH = re.compile(
    r"([DIWE])\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ ([\w./-]{1,160}\.py:\d+)\](?: \[[\d/_]+\])? ?"
)
"""torch's logger, as it prints an error of the compiler."""
_UVICORN = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL|TRACE): {2,8}")

# Formats of one's own (VLLM_LOGGING_CONFIG_PATH), of Dynamo and of Ray: time, level and logger in
# any order, with any separators. It needs a level, and a time or a logger.
_LEVEL = r"(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL)\b"
_LOGGER = r"(?:vllm\b|[a-z_]\w*(?:\.[a-z_]\w*)+)(?::[\w<>]+(?=:\d))?(?::\d+)?"
_CLOCK = r"(?:\d{4}[-/]\d\d[-/]\d\d[T ,] ?)?\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_THREAD = r"(?:Main(?:Thread|Process)\b(?::\d{1,9})?|[A-Z]\w{2,40}:\d{1,9}\b)"
_OTHER_FORMAT = re.compile(
    rf"[\s\[(<|-]{{0,4}}(?:(?:(?P<time>{_CLOCK})|(?P<before>{_LOGGER})|\d{{1,7}}|{_THREAD})"
    rf"[\s\])>|,:\[(<-]{{1,8}}){{0,4}}(?P<level>{_LEVEL})"
    rf"(?:[\s\])>|:\[(<-]{{1,9}}(?:(?P<later>{_CLOCK})|(?P<after>{_LOGGER})"
    rf"|\d{{1,7}}(?=[\])|])|{_THREAD})){{0,3}}"
    r"\s*(?:[\])>]+ ?[:|-]?|[:|]|--?(?=\s))?(?:\s|$|(?<=:))"
)
_ANY_LEVEL = re.compile(_LEVEL)
_LEVEL_AT = 120
"""Characters in which the level of such a format stands."""
_LEVELS = {
    "WARN": "WARNING",
    "FATAL": "CRITICAL",
    # of torch
    "D": "DEBUG",
    "I": "INFO",
    "W": "WARNING",
    "E": "ERROR",
}

_RECORD = (
    r"\((?:A(?:PI|pi)Server|(?:DP)?EngineCore|Worker|VllmWorker|MainProcess)[\w.:-]* pid=\d+\) "
    r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d "
)
# A progress bar ends without a newline, so a log line of any process may follow it on its line. A
# page may join the lines of a log.
_GLUED = re.compile(rf"(?<=\S)(?:(?={_RECORD})| (?={_RECORD}.{{1,2000}} {_RECORD}))")
_JOINED = re.compile(rf"(?<=\S) (?={_RECORD})")
_ENGINES = ("EngineCore", "DPEngineCore", "Worker", "VllmWorker")

# Docker, Loki and its CSV, CloudWatch and fluentd, Datadog, journald, structured loggers, Google
# Cloud, OpenTelemetry
_RECORD_KEYS = (
    "log",
    "line",
    "Line",
    "message",
    "Message",
    "MESSAGE",
    "msg",
    "textPayload",
    "body",
    "Body",
    "Content",
    "original",
)
_INNER = ("attributes", "_source", "jsonPayload", "event")
_RECORD_IN_LINE = re.compile(
    r"(?:\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*(?: [+-]\d{4})?(?:\s[\w.-]{1,80}:?)?\s(?=\{\"))?"
    r"(?=\{.|\[\{.)"
)
"""What may stand before a JSON record: nothing, or fluentd's time and tag."""
_PAIR = re.compile(r'([\w.-]+)=("(?:[^"\\]|\\.)*"|[^\s"]*)(?:\s+|$)')
_LOGFMT = re.compile(f"(?:{_PAIR.pattern}){{3,}}".replace('("', '(?:"').replace("([", "(?:["))
"""A record of logfmt: at least three pairs of a name and a value, which may be quoted."""
_MARKS = re.compile(r"^(?:[>|] ?)+")
"""Marks of a quotation in Markdown or a mail."""
_FIELD = re.compile(rf'\s*"(?:{"|".join(_RECORD_KEYS)})": ("(?:[^"\\]|\\.)*"),?\s*')
"""A message in JSON that is printed over several lines."""


def from_the_end(lines: list[Line]) -> list[Line]:
    """Return the lines in reverse, numbered in that order."""
    return [line._replace(number=_LAST - line.number) for line in reversed(lines)]


def line_in_file(number: float) -> int:
    """Return a line's number in the file, without its fraction, also for one of `from_the_end`."""
    return int(number if number * 2 < _LAST else _LAST - number)


def read_lines(
    source: str | bytes | Iterable[str | bytes], runs: AccessRuns | None = None
) -> Iterator[Line]:
    """Yield the lines of a log or a pasted text, each parsed into process, level and message.

    Bytes are decoded as UTF-8 or UTF-16; invalid bytes become U+FFFD. Lines without a message are
    yielded too.

    source: the whole text, an open file, or an iterable of pieces that each hold whole lines.
    runs: skips runs of access lines and token counts, if `source` is an open binary file.
    """
    prefixes = Prefixes()
    runs = runs or AccessRuns()
    pieces = _pieces(_physical_lines(source, runs))
    ahead = list(islice(pieces, _AHEAD))
    skipped, learnt = 0, ahead[-1][0] if ahead else 0
    for _, _, at, piece in ahead:
        prefixes.learn(piece, at)
    for number, stream, at, piece in chain(ahead, pieces):
        if number > learnt:
            prefixes.learn(piece, at)
        prefixes.learn_bare(runs.stamped - skipped)  # what was skipped began with vLLM's own words
        skipped = runs.stamped
        runs.off |= prefixes.mostly_prefixed  # then no line begins with vLLM's own words
        yield from _split_glued(number, stream, piece, prefixes.end(piece, at))


def _pieces(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[float, str, int, str]]:
    """Split lines at carriage returns; yield (number, container, end of collector's prefix, text).

    The numbers of the pieces of one line differ by fractions.
    """
    last: float = 0
    for number, physical in lines:
        for piece in _carriage_pieces(physical):
            last = number if number > last else last + _PART
            yield last, *piece


# ── lines of text ───────────────────────────────────────────────────────────


def _physical_lines(
    source: str | bytes | Iterable[str | bytes], runs: AccessRuns
) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of the lines of `source`; of JSON and CSV the log lines in them.

    Lines that a terminal wrapped are joined, and `runs` may then skip nothing.
    """
    if isinstance(source, io.BufferedReader) and _encoding(source.peek(2)) != "utf-8":
        source = source.read()
    if isinstance(source, bytes):
        source = source.decode(_encoding(source), "replace")
    if isinstance(source, str):
        pieces: Iterable[str | bytes] = (source,)
    else:
        pieces = _bounded(source) if isinstance(source, io.IOBase) else source
        if isinstance(source, io.BufferedReader):
            pieces = runs.read(source, MAX_LINE)
    lines = _split(pieces)
    head = list(islice(lines, _SAMPLE))
    if head:
        head[0] = head[0].removeprefix("\ufeff")
    bars = sum(line.startswith("|") for line in head) * 2 > sum(map(bool, head))
    marks = ">|" if bars else ">"
    head = [_unmarked(line, marks) for line in head]
    rest = (_unmarked(line, marks) for line in lines)
    indents = [_indent(line) for line in head if line.strip()]
    if len(indents) > _FEW and (indent := min(indents)):
        head = [line[indent:] for line in head]
        rest = (line[indent:] if not line[:indent].strip() else line for line in rest)
    every = enumerate(chain(head, rest), start=1)
    tables = ((at, _table(*two)) for at, two in enumerate(pairwise(head)))
    start, table = next((each for each in tables if each[1]), (0, None))
    if table:
        yield from islice(every, start)
        rows = _from_csv((line for _, line in every), *table)
        yield from ((number + start, text) for number, text in rows)
        return
    width = _width(head)
    printed = any(line.strip() in ("[", "{") for line in head) and any(map(_FIELD.fullmatch, head))
    only_records = printed and head[0].strip() in ("[", "{")
    literals = not any(_BEGINS_RECORD.match(line) for line in head)
    runs.off = width > 0
    for number, line in _unwrapped(every, width) if width else every:
        texts = [line]
        if printed and (field := _FIELD.fullmatch(line)):
            texts = _from_field(field[1])
        elif only_records:
            continue
        elif "{" in line and (match := _RECORD_IN_LINE.match(line)):
            texts = _from_record(line[match.end() :])
        elif "msg=" in line and _LOGFMT.fullmatch(line):
            pairs = {name: _from_field(text)[0] for name, text in _PAIR.findall(line)}
            texts = _from_record(json.dumps(pairs))
        elif literals and line.lstrip("b").startswith(("'", '"')):
            texts = _from_literal(line)
        yield from ((number + runs.lines, text) for text in texts)


def _indent(line: str) -> int:
    """Return the number of blanks and tabs at the beginning of a line."""
    return len(line) - len(line.lstrip(" \t"))


def _unmarked(line: str, marks: str) -> str:
    """Return a line without the marks of a quotation and without the end of Windows' lines."""
    return (_MARKS.sub("", line, count=1) if line[:1] in marks else line).rstrip("\r")


_BEGINS = re.compile(
    r"\([A-Za-z][\w.:-]*[^)]{0,20} pid=|\[(?:pod|rank|\d)|\{\"|\S+\s+\||\d{4}-\d\d-"
    r"|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b|[A-Z][a-z]{2} [ \d]\d \d\d:"
    r"|[│┃]| *(?:File \"|Traceback |[~^]{3})|(?:[a-z_]\w*\.)*[A-Z]\w+(?:Error|Exception)\b"
)
"""The beginning of a record, a frame or an exception, which continues no wrapped line."""
_BEGINS_RECORD = re.compile(r"\(\w+ pid=|(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)\b")
_MOST_ROWS = 400
"""Most rows of a terminal that are joined into one line."""


def _width(head: list[str]) -> int:
    """Return the width at which a terminal wrapped the lines; 0 if it wrapped none."""
    width = max(map(len, head), default=0)
    full = sum(
        2 if line.startswith('  File "') else 1
        for line, after in pairwise(head)
        if len(line) == width and after.strip() and not _BEGINS.match(after)
    )
    return width if width in _COLUMNS and full >= _FULL else 0


def _unwrapped(lines: Iterable[tuple[int, str]], width: int) -> Iterator[tuple[int, str]]:
    """Join the rows of each wrapped line; yield (number of its first row, text)."""
    first, rows = 0, [""]
    for number, line in lines:
        wraps = len(rows[-1]) == width and len(rows) < _MOST_ROWS
        if first and not (wraps and line and not _BEGINS.match(line)):
            yield first, "".join(rows)
            first, rows = 0, []
        first = first or number
        rows.append(line)
    if first:
        yield first, "".join(rows)


def _encoding(first: bytes) -> str:
    """Return the encoding of the first bytes: UTF-16 has a mark, or a zero byte (PowerShell)."""
    if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16"
    if len(first) > 1 and 0 in first[:2]:
        return "utf-16-be" if first[0] == 0 else "utf-16-le"
    return "utf-8"


def _split(pieces: Iterable[str | bytes]) -> Iterator[str]:
    """Yield the lines in pieces of text without their ends, each cut at `MAX_LINE` characters."""
    for piece in pieces:
        text = piece.decode("utf-8", "replace") if isinstance(piece, bytes) else piece
        start = 0
        while start < len(text):
            end = text.find("\n", start)
            if end < 0:
                end = len(text)
            yield text[start : min(end, start + MAX_LINE)].replace("\0", "")
            start = end + 1


_TITLE = re.compile(r"[\w@.-]+(?: [\w@.-]+){0,3}")


def _table(first: str, second: str) -> tuple[str, int] | None:
    """Return a table's delimiter and its column with the messages; None if it is no table.

    first, second: the line that may hold the titles, and the line below it.
    """
    for delimiter in ",;":
        if delimiter in second and any(key in first for key in _RECORD_KEYS):
            _, titles = next(_rows([first], delimiter), (0, []))
            column = next((at for at, title in enumerate(titles) if title in _RECORD_KEYS), None)
            if column is not None and all(map(_TITLE.fullmatch, titles)):
                return delimiter, column
    return None


def _from_csv(lines: Iterable[str], delimiter: str, column: int) -> Iterator[tuple[int, str]]:
    """Yield (number, text) of one column of a table, as Grafana and other collectors export it."""
    lines, last = iter(lines), 0
    for end, row in _rows(lines, delimiter):
        texts = row[column].split("\n") if column < len(row) else row
        yield from ((min(at, end), text) for at, text in enumerate(texts, start=last + 1))
        last = end
    # what is behind a quotation mark that nothing closes
    yield from enumerate(lines, start=last + 1)


def _rows(lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of its last line, row) of a CSV text, up to the first error in it."""
    csv.field_size_limit(MAX_LINE)
    reader = csv.reader((line.replace("\r", "") + "\n" for line in lines), delimiter=delimiter)
    with suppress(csv.Error):
        yield from ((reader.line_num, row) for row in reader)


def _bounded(file: io.IOBase) -> Iterator[str | bytes]:
    """Yield the lines of a file, each cut at `MAX_LINE` characters or bytes."""
    whole = True
    while piece := file.readline(MAX_LINE):
        if whole:
            yield piece
        whole = piece.endswith(b"\n" if isinstance(piece, bytes) else "\n")


def _from_record(line: str) -> list[str]:
    """Return the log lines in a JSON record, or the line itself if it is not JSON."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return [line]
    if isinstance(record, list):
        return [text for item in record for text in _from_record(json.dumps(item))]
    if not isinstance(record, dict):
        return [line]
    # Datadog and Elasticsearch put the message one level deeper
    for place in (
        record,
        *(inner for name in _INNER if isinstance(inner := record.get(name), dict)),
    ):
        for key in _RECORD_KEYS:
            text = place.get(key)
            # journald writes a message with colours as a list of bytes
            if (
                isinstance(text, list)
                and text
                and all(isinstance(byte, int) and 0 <= byte < 256 for byte in text)
            ):
                text = bytes(text).decode("utf-8", "replace")
            if isinstance(text, str):
                return [*(_level(place) + text.rstrip("\r\n")).split("\n"), *_traceback(place)]
    with suppress(RecursionError):
        return _nested(record) or [line]
    return [line]


def _nested(value: object) -> list[str]:
    """Return the messages of records inside the answer of a log store, such as CloudWatch or Loki.

    Empty without any. Loki's records are pairs of a time and a line.
    """
    if isinstance(value, dict):
        return [text for inner in value.values() for text in _nested(inner)]
    texts: list[str] = []
    for item in value if isinstance(value, list) else ():
        if isinstance(item, dict):
            with suppress(RecursionError):
                record = json.dumps(item)
                texts += [text for text in _from_record(record) if text != record]
        elif isinstance(item, list) and [type(part) for part in item[:2]] == [str, str]:
            texts.append(item[1])
    return texts


def _from_field(value: str) -> list[str]:
    """Decode the value of a printed field; return it unchanged if it is no JSON string."""
    with suppress(ValueError):
        return [str(json.loads(value))]
    return [value]


def _from_literal(line: str) -> list[str]:
    """Decode a string that Python or jq printed into lines; return any other line unchanged."""
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
        text = ast.literal_eval(line.strip())
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        if isinstance(text, str):
            return text.split("\n")
    return [line]


def _level(record: dict[str, Any]) -> str:
    """Return the level of a JSON record as uvicorn prints it, such as `INFO:     `; else ""."""
    level = record.get("levelname")
    return f"{level}:     " if isinstance(level, str) else ""


def _traceback(record: dict[str, Any]) -> list[str]:
    """Return the lines of the traceback in a JSON record (`exc_info`); empty without one."""
    text = record.get("exc_info")
    return text.rstrip("\n").split("\n") if isinstance(text, str) else []


# ── the parts of a line ─────────────────────────────────────────────────────


_BAR = re.compile(r"(\d\w?/[\d.]+\w? \[\d+:\d\d[^\[\]]*\])(?=[\w\[/(])")
"""A progress bar that another program's words follow: a bar ends without a line's end."""


def _carriage_pieces(physical: str) -> list[tuple[str, int, str]]:
    """Split a line at carriage returns into (container, where a collector's prefix ends, text)."""
    clean = _uncoloured(physical).replace("\xa0", " ").rstrip("\r")
    if clean.startswith(("│", "┃")):  # the frame of a terminal's window
        clean = clean.strip("│┃").rstrip()
    if "/s]" in clean or "/it]" in clean:
        clean = _BAR.sub(r"\1\r", clean)
    if "\r" not in clean:
        return [(*_collected(clean), clean)]
    return [(*_collected(piece), piece) for piece in clean.split("\r") if piece]


def _uncoloured(text: str) -> str:
    """Return a line without colours, escapes, HTML entities and Ray's note on repetition."""
    if "&quot;" in text or "&#" in text:  # copied from the source of a web page
        text = html.unescape(text)
    if "[" in text and any(mark in text for mark in _WRITTEN_MARKS):
        text = _WRITTEN_ESC.sub("\x1b", text)
    if "\x1b" in text:
        text = ANSI.sub("", text)
    if " across cluster]" in text:
        text = _REPEATED.sub("", text)
    return _NO_ESC.sub("", text) if "m" in text and "[" in text else text


def _collected(piece: str) -> tuple[str, int]:
    """Return the container in a log collector's prefix, or "", and the end of the prefix."""
    stream, at = "", 0
    if piece.startswith("("):  # as vLLM's own prefix does, and no collector's
        return stream, at
    for collector in _COLLECTORS:
        if match := collector.match(piece, at):
            at = match.end()
            stream = match["stream"] if collector.groups else stream
    return stream, at


def _split_glued(number: float, stream: str, piece: str, at: int) -> tuple[Line, ...]:
    """Return a line, or several if further records were written into it without a line break.

    at: where vLLM's prefix may begin, after a stamp of a log collector.
    """
    line = _parse(number, stream, piece, at)
    lines: list[Line] = []
    while (
        " pid=" in line.text
        and len(lines) < 500
        and (cut := (_JOINED if lines else _GLUED).search(piece, len(piece) - len(line.text) + 1))
    ):
        rest = _parse(number + _PART, stream, piece[cut.end() :], 0)
        # An API server's message may quote other lines, which stay in it.
        if (
            line.level
            and not line.process.startswith(_ENGINES)
            and (line.level != "ERROR" or rest.speaker != line.speaker)
        ):
            break
        lines.append(_parse(number, stream, piece[: cut.start()], at))
        number, piece, at, line = rest.number, piece[cut.end() :], 0, rest
    return (*lines, line)


def _parse(number: float, stream: str, raw: str, at: int) -> Line:
    """Return a line with the process, pid, level, time and source that its prefixes name.

    at: index in `raw` at which the prefixes begin.
    """
    process, pid = "", None
    # Ray puts a prefix before vLLM's, and a launcher the rank; the innermost names the process.
    while raw.startswith(("(", "[rank"), at) and (match := _PROCESS.match(raw, at)):
        process, pid = match[1] or match[3] or match[4], int(match[2]) if match[2] else None
        at = match.end()
    level = time = source = ""
    if match := _VLLM.match(raw, at):
        level, time, source, at = match[1], match[2] or "", match[3] or match[4], match.end()
    elif match := _UVICORN.match(raw, at):
        level, at = match[1], match.end()
    elif match := _TORCH.match(raw, at):
        level, source, at = _LEVELS[match[1]], match[2], match.end()
    elif not process and (match := _other_format(raw, at)):
        level = _LEVELS.get(match["level"], match["level"])
        source = (match["before"] or match["after"] or "log").rstrip(":0123456789")
        time, at = match["time"] or match["later"] or "", match.end()
    return Line(number, stream, process, pid, level, time, source, raw[at:], raw)


def _other_format(raw: str, at: int) -> re.Match[str] | None:
    """Return the match of a logging format that has a level, and a time or the name of a logger.

    None without one.
    """
    if _ANY_LEVEL.search(raw, at, at + _LEVEL_AT) is None or not (
        match := _OTHER_FORMAT.match(raw, at)
    ):
        return None
    known = match["time"] or match["later"] or match["before"] or match["after"]
    return match if known or _STAMP.search(raw, 0, at) else None
