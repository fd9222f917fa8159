"""Text of logs and command lines, safe inside Markdown and HTML, and short enough for GitHub.

GitHub must render the text as it is: no markup, no link, no mention of a person or an issue. A
comment there holds 65,536 characters; whether that means letters or bytes is not documented
everywhere, so both are kept.
"""

from __future__ import annotations

import re
from html import escape
from typing import NamedTuple

from vllm_repro_diagnosis.log_text import ANSI

LIMIT = 65_536
"""Bytes of a comment on GitHub."""

_LEAST = 48
"""Bytes below which an excerpt is useless."""

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff"
    # Marks that reverse text, show nothing or hide a text of their own.
    "\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f]"
)
_MOST_TICKS = 16
"""Longer runs of backticks are shortened, because the fence around them must be longer still."""

_GAP = "&#x200B;"
"""A zero-width space.

GitHub looks for mentions in the rendered text, so a backslash or an entity does not prevent them.
"""

_MENTIONS = (
    (re.compile(r"@(?=\S)"), f"@{_GAP}"),  # `1@.a` is a mail address to GitHub
    (re.compile(r"#(?=\d)"), f"#{_GAP}"),
    (re.compile(r"(?i)\b(GH-)(?=\d)"), rf"\1{_GAP}"),
    (re.compile(r"(?i)\b((?:https?|ftp):)(?=//)"), rf"\1{_GAP}"),
    (re.compile(r"(?i)\b(www)(?=\.)"), rf"\1{_GAP}"),
)
_SYNTAX = re.compile(
    r"[\\`*|~$]|<(?=[A-Za-z/!?])|\](?=[(\[:])|&(?=#?\w+;)|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
)
_BLOCK = re.compile(r"^(?:[#>+=-]|\d+(?=[.)]))")


# ── escaping
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def printable(text: str) -> str:
    """Return `text` without colours, with line feeds, and U+FFFD for what does not print."""
    text = ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def fence(text: str, language: str = "") -> str:
    """Return `text` as a Markdown code block, whose fence `text` cannot end."""
    text = _short_ticks(printable(text)).rstrip("\n")  # the last line of a diff may be one space
    marks = "`" * max(3, _longest_ticks(text) + 1)
    return f"{marks}{language}\n{text}\n{marks}"


def plain(text: str) -> str:
    """Return `text` as a paragraph on one line, without markup, links or mentions."""
    return _BLOCK.sub(
        lambda sign: sign[0] + "\\" if sign[0].isdigit() else "\\" + sign[0], cell(text)
    )


def cell(text: str) -> str:
    """Return `text` for a table cell or the middle of a line, without markup, links or mentions."""
    # Escape before breaking mentions: a gap contains a sign that is escaped.
    return _break_mentions(_SYNTAX.sub(lambda sign: "\\" + sign[0], one_line(text)))


def code(text: str, *, in_table: bool = False) -> str:
    """Return `text` as inline code on one line.

    in_table: escape `|`, too, because in a table GitHub splits columns before it finds code.
    """
    line = _short_ticks(one_line(text))
    if not line:
        return "` `"
    if in_table:
        line = line.replace("|", "\\|")
    marks = "`" * (_longest_ticks(line) + 1)
    return f"{marks} {line} {marks}" if len(marks) > 1 else f"`{line}`"


def html(text: str) -> str:
    """Return `text` for the content of an HTML element, on one line, without links or mentions."""
    return _break_mentions(escape(one_line(text), quote=False))


def one_line(text: str) -> str:
    """Return `text` on one line, with one space between words."""
    return " ".join(printable(text).split())


def _break_mentions(line: str) -> str:
    """Return a line in which GitHub finds no mention, issue number or link."""
    for pattern, replacement in _MENTIONS:
        line = pattern.sub(replacement, line)
    return line


def _longest_ticks(text: str) -> int:
    """Return the length of the longest run of backticks; 0 without one."""
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def _short_ticks(text: str) -> str:
    """Return `text` in which very long runs of backticks are cut and counted."""
    return re.sub(
        rf"`{{{_MOST_TICKS + 1},}}",
        lambda run: f"{'`' * _MOST_TICKS}[{len(run[0])} backticks]",
        text,
    )


class Table(NamedTuple):
    """A table of plain text."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def markdown_table(table: Table) -> str:
    """Return a table as Markdown; cells are escaped, headings are not."""
    lines = ["| " + " | ".join(table.heads) + " |", "|---" * len(table.heads) + "|"]
    return "\n".join((*lines, *("| " + " | ".join(map(cell, row)) + " |" for row in table.rows)))


# ── limits
# ──────────────────────────────────────────────────────────────────────────────────────────────────


def size(text: str) -> int:
    """Return the length in bytes of UTF-8, which is never less than the number of letters."""
    return len(text.encode("utf-8", "replace"))


def shorten(text: str, limit: int) -> str:
    """Return `text` in at most `limit` bytes, with its middle left out and counted.

    Empty if the limit leaves room for fewer than 48 bytes of it.
    """
    if size(text) <= limit:
        return text
    room = limit - size(_gap(size(text)))
    if room < _LEAST:
        return ""
    encoded = text.encode("utf-8", "replace")
    start, end = encoded[: room // 2], encoded[len(encoded) - room // 2 :]
    return (
        f"{start.decode('utf-8', 'ignore')}{_gap(size(text) - room)}{end.decode('utf-8', 'ignore')}"
    )


def _gap(left_out: int) -> str:
    """Return the mark for bytes left out: ` [… 1,234 bytes left out …] `."""
    return f" [… {left_out:,} bytes left out …] "
