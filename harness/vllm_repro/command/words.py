"""Words of a pasted shell command, each with its line number.

Issues are less tidy than scripts: prompts, Markdown fences, placeholders such as `<HEAD_IP>`, a
blank after the closing backslash. `shlex` is not used: it parses a placeholder as a redirection,
and its tokens do not distinguish a quoted `;` from an operator.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from vllm_repro.errors import CommandError

_FENCE = r"[ \t]*(?:```|~~~)[^\n]*"
_PROMPT = r"[ \t]*(?:\([^()\n]*\)[ \t]*)?(?:[\w.-]+@[\w.-]+[^\n$%#]*)?[$%][ \t]+"
_CONTINUED = r"\\[ \t\r]*(?:\n|\Z)"
_PLACEHOLDER = r"<\w(?:[\w ./:|-]*\w)?>"
_TOKEN = re.compile(
    rf"""
    (?P<blank> (?:\A|(?<=\n)) (?:{_FENCE}|{_PROMPT}) | [ \t\r]+ | {_CONTINUED} | \#[^\n]*)
    | (?P<end> \n | && | \|\|? | ; | &(?=\s|\Z))
    | (?P<redirection> (?!{_PLACEHOLDER}) (?:\d*|&) (?:>>|>\||>|<) (?:&\d+)?)
    | (?P<word> (?: '[^']*' | "(?:[^"\\]|\\.)*" | (?!{_CONTINUED})\\. | {_PLACEHOLDER}
                  | \$\([^()\n]*\) | &(?![&\s]|\Z) | [^ \t\r\n|;\\'"<>&] )+ )
    """,
    re.VERBOSE | re.DOTALL,
)
_QUOTED = re.compile(r"""'([^']*)'|"((?:[^"\\]|\\.)*)"|\\(.)""", re.DOTALL)
_ESCAPED = re.compile(r'\\(["\\$`])|\\\n')


@dataclass(frozen=True)
class Word:
    """One word without its quotes. `line` counts from 1 within the pasted text."""

    text: str
    line: int


def split_words(text: str) -> list[Word]:
    """Return all words of a text that holds one command."""
    return [word for command in split_commands(text) for word in command]


def split_commands(text: str, line: int = 1) -> list[list[Word]]:
    """Return the words of each simple command; `line` is the number of the first line.

    A command ends at a line end without a backslash and at `;`, `&`, `&&`, `|` and `||`. Comments,
    prompts, fences and redirections are left out. Raises `CommandError` for an unclosed quote.
    """
    text = text.replace("\r\n", "\n")
    if all(row.startswith(">") for row in text.split("\n") if row.strip()):  # a Markdown quotation
        text = re.sub(r"(?m)^[> ]+", "", text)
    commands: list[list[Word]] = [[]]
    at, skip_next = 0, False
    while at < len(text):
        here = line + text.count("\n", 0, at)
        token = _TOKEN.match(text, at)
        if token is None:
            start = text[at:].splitlines()[0][:30]
            raise CommandError(
                f"the quote {start[0]} before {start[1:]!r} is never closed",
                line=here,
                hint=f"close it with {start[0]}, or put the value in the other kind of quotes",
            )
        if token.lastgroup == "end":
            commands.append([])
            skip_next = False
        elif token.lastgroup == "redirection":
            skip_next = not token[0][-1].isdigit()  # a file name follows, except after `2>&1`
        elif token.lastgroup == "word":
            if not skip_next:
                commands[-1].append(Word(_QUOTED.sub(_unquote, token[0]), here))
            skip_next = False
        at = token.end()
    return [command for command in commands if command]


def _unquote(match: re.Match[str]) -> str:
    """Return a matched part of a word without its quotes or backslash."""
    single, double, escaped = match.groups()
    if double is not None:
        return _ESCAPED.sub(lambda escape: escape[1] or "", double)
    return str(escaped if single is None else single)
