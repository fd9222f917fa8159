"""The words of a command as people paste it, each with its line, and which of them start the vLLM server.

`shlex` knows no lines and takes the text as a shell would. An issue holds less tidy text: prompts, Markdown
fences, placeholders such as `<HEAD_IP>` (which a shell would read as a redirection), a blank after the
closing backslash, no backslashes at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_repro.errors import CommandError

__all__ = ["ASSIGNMENT", "Word", "find_server", "split_commands", "split_words"]

ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)

_SERVER_MODULE = "vllm.entrypoints.openai.api_server"
_SERVER_FILE = "vllm/entrypoints/openai/api_server.py"

_PROMPT = re.compile(r"[ \t]*(?:\([^()\n]*\)[ \t]*)?(?:[\w.-]+@[\w.-]+[^\n$%#]*)?[$%][ \t]+")
_FENCE = re.compile(r"[ \t]*(?:```|~~~)[^\n]*")
_CONTINUED = re.compile(r"\\[ \t\r]*(?:\n|\Z)")
_PLACEHOLDER = re.compile(r"<\w(?:[\w ./:|-]*\w)?>")
_SUBSTITUTION = re.compile(r"\$\([^()\n]*\)")
_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>|>\||>|<)(?:&\d+)?")
_OPERATOR = re.compile(r"&&|\|\||\||;|&(?=\s|$)")
_PLAIN_END = " \t\r\n|;\\'\"<>&"
_QUOTED_ESCAPES = '"\\$`\n'


@dataclass(frozen=True)
class Word:
    """One word after quotes are gone; `line` counts from 1 within the pasted text."""

    text: str
    line: int


def split_words(text: str, line: int = 1) -> list[Word]:
    """All words of a text that is one command, whatever its line ends; `line` is the first line's number."""
    return [word for command in split_commands(text, line) for word in command]


def split_commands(text: str, line: int = 1) -> list[list[Word]]:
    """Words by simple command: a new list at each line end without a backslash and at each of `; & && | ||`.

    Comments, prompts, fences and redirections are left out. Raises `CommandError` for a quote that is never
    closed.
    """
    if all(row.startswith(">") for row in text.strip().splitlines()):
        text = "\n".join(row.lstrip("> ") for row in text.strip().splitlines())
    return _Reader(text.replace("\r\n", "\n"), line).read()


class _Reader:
    """One pass over the text; `at` is the position, `line` the line of it."""

    def __init__(self, text: str, line: int) -> None:
        self.text = text
        self.line = line
        self.at = 0
        self.commands: list[list[Word]] = [[]]
        self.skip_next = False

    def read(self) -> list[list[Word]]:
        line_start = True
        while self.at < len(self.text):
            if line_start and (lead := _FENCE.match(self.text, self.at) or _PROMPT.match(self.text, self.at)):
                self._advance(lead.end())
                line_start = False
                continue
            here = self.text[self.at]
            if here == "\n":
                self._end_command()
                self._advance(self.at + 1)
                line_start = True
            elif here in " \t\r":
                self._advance(self.at + 1)
            elif continued := _CONTINUED.match(self.text, self.at):
                self._advance(continued.end())
            elif here == "#":
                end = self.text.find("\n", self.at)
                self._advance(len(self.text) if end < 0 else end)
            elif operator := _OPERATOR.match(self.text, self.at):
                self._end_command()
                self._advance(operator.end())
            elif not _PLACEHOLDER.match(self.text, self.at) and (arrow := _REDIRECTION.match(self.text, self.at)):
                self.skip_next = not arrow[0][-1].isdigit()
                self._advance(arrow.end())
            else:
                line_start = False
                self._word()
        return [command for command in self.commands if command]

    def _advance(self, end: int) -> str:
        passed = self.text[self.at : end]
        self.line += passed.count("\n")
        self.at = end
        return passed

    def _end_command(self) -> None:
        self.skip_next = False
        if self.commands[-1]:
            self.commands.append([])

    def _word(self) -> None:
        line = self.line
        parts: list[str] = []
        while self.at < len(self.text):
            here = self.text[self.at]
            if continued := _CONTINUED.match(self.text, self.at):
                self._advance(continued.end())
                # A backslash right at a word: the shell would glue the next line on, which nobody means.
                break
            if here == "\\":
                parts.append(self._advance(self.at + 2)[1:])
            elif here == "'":
                parts.append(self._single())
            elif here == '"':
                parts.append(self._double())
            elif literal := _PLACEHOLDER.match(self.text, self.at) or _SUBSTITUTION.match(self.text, self.at):
                parts.append(self._advance(literal.end()))
            elif here == "&" and not _OPERATOR.match(self.text, self.at):
                parts.append(self._advance(self.at + 1))
            elif here in _PLAIN_END:
                break
            else:
                parts.append(self._advance(self.at + 1))
        if self.skip_next:
            self.skip_next = False
            return
        self.commands[-1].append(Word("".join(parts), line))

    def _single(self) -> str:
        end = self.text.find("'", self.at + 1)
        if end < 0:
            raise self._unclosed("'")
        return self._advance(end + 1)[1:-1]

    def _double(self) -> str:
        opened = self.at
        parts: list[str] = []
        at = opened + 1
        while at < len(self.text) and self.text[at] != '"':
            if self.text[at] == "\\" and self.text[at + 1 : at + 2] in _QUOTED_ESCAPES and at + 1 < len(self.text):
                parts.append("" if self.text[at + 1] == "\n" else self.text[at + 1])
                at += 2
            else:
                parts.append(self.text[at])
                at += 1
        if at >= len(self.text):
            raise self._unclosed('"')
        self._advance(at + 1)
        return "".join(parts)

    def _unclosed(self, quote: str) -> CommandError:
        start = self.text[self.at : self.at + 30].splitlines()[0]
        return CommandError(
            f"the quote {quote} before {start[1:]!r} is never closed",
            line=self.line,
            hint=f"close it with {quote}, or put the value in the other kind of quotes",
        )


def find_server(words: Sequence[str]) -> tuple[int, int] | None:
    """Where the server is started in `words`: the span of `vllm serve`, `python -m
    vllm.entrypoints.openai.api_server` or the like.

    The arguments begin at the second number. None where no server is started.
    """
    for i, word in enumerate(words):
        name = word.rsplit("/", 1)[-1]
        if name == "vllm" and words[i + 1 : i + 2] == ["serve"]:
            return i, i + 2
        if word == _SERVER_MODULE or word.endswith(_SERVER_FILE):
            start = i - 1 if i and words[i - 1] == "-m" else i
            while start and (words[start - 1].startswith("-") or "python" in words[start - 1].rsplit("/", 1)[-1]):
                start -= 1
            return start, i + 1
    return None
