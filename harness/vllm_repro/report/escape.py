"""Text of logs and command lines within Markdown, as GitHub reads it: it breaks out of nothing, calls nobody, links to nothing. Pure."""

from __future__ import annotations

import re
from html import escape

from vllm_repro.diagnosis.log_text import ANSI

__all__ = ["cell", "code", "fence", "html", "plain", "printable"]

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff"
    # Marks that turn the text around, show nothing, or hide a text of their own: what is read must be what is there.
    "\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
_MOST_TICKS = 16
"""A longer run of backticks is shortened: the fence around it has to be longer still."""

_GAP = "&#x200B;"
"""A space of no width. GitHub looks for names and numbers in what it has rendered, so a backslash or an entity would not do."""

_CALLS = (
    (re.compile(r"@(?=\S)"), f"@{_GAP}"),  # not only before a name: `1@.a` is a mail address there
    (re.compile(r"#(?=\d)"), f"#{_GAP}"),
    (re.compile(r"(?i)\b(GH-)(?=\d)"), rf"\1{_GAP}"),
    (re.compile(r"(?i)\b((?:https?|ftp):)(?=//)"), rf"\1{_GAP}"),
    (re.compile(r"(?i)\b(www)(?=\.)"), rf"\1{_GAP}"),
)
_SYNTAX = re.compile(r"[\\`*|~$]|<(?=[A-Za-z/!?])|\](?=[(\[:])|&(?=#?\w+;)|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_BLOCK = re.compile(r"^(?:[#>+=-]|\d+(?=[.)]))")


def printable(text: str) -> str:
    """`text` without colours; what does not print becomes U+FFFD, and every line ends as GitHub thinks that lines end."""
    text = ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", text)


def fence(text: str, language: str = "") -> str:
    """A code block that `text` cannot break out of, whatever it holds."""
    text = _tamed(printable(text)).rstrip()
    marks = "`" * max(3, _longest(text) + 1)
    return f"{marks}{language}\n{text}\n{marks}"


def plain(text: str) -> str:
    """Text of a paragraph, on one line: no markup, no HTML, no link, and nobody is called by it."""
    line = _escaped(text)
    return _BLOCK.sub(lambda found: found[0] + "\\" if found[0].isdigit() else "\\" + found[0], line)


def cell(text: str) -> str:
    """Text for a table cell or within a line: as `plain`, and no column breaks."""
    return _escaped(text)


def code(text: str, *, in_table: bool = False) -> str:
    """Text as inline code, on one line. In a table columns are told apart before code is."""
    line = " ".join(_tamed(printable(text)).split())
    if not line:
        return "` `"
    if in_table:
        line = line.replace("|", "\\|")
    marks = "`" * (_longest(line) + 1)
    return f"{marks} {line} {marks}" if len(marks) > 1 else f"`{line}`"


def html(text: str) -> str:
    """Text between HTML tags, on one line."""
    return _uncalling(escape(" ".join(printable(text).split()), quote=False))


def _escaped(text: str) -> str:
    line = " ".join(printable(text).split())
    # First the signs: a gap has one in it.
    return _uncalling(_SYNTAX.sub(lambda found: "\\" + found[0], line))


def _uncalling(line: str) -> str:
    for pattern, stand_in in _CALLS:
        line = pattern.sub(stand_in, line)
    return line


def _longest(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)


def _tamed(text: str) -> str:
    return re.sub(rf"`{{{_MOST_TICKS + 1},}}", lambda run: f"{'`' * _MOST_TICKS}[{len(run[0])} backticks]", text)
