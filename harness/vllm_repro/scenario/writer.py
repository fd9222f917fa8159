"""Text of a scenario file from its parts. Pure.

Data becomes literals, and words of the vocabulary are imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Source:
    """Python source, which is written as it is."""

    text: str


@dataclass
class ScenarioWriter:
    """A scenario file in the making. Fields are written in the order of `put`."""

    # Words of the vocabulary to import.
    _words: set[str] = field(default_factory=set)
    # Fields and comments as source.
    _lines: list[str] = field(default_factory=list)

    def word(self, name: str) -> Source:
        """Return a word of the vocabulary as source, and import it in the file."""
        self._words.add(name)
        return Source(name)

    def call(self, word: str, /, *values: Any, **named: Any) -> Source:
        """Return a call of a word of the vocabulary in one line, and import the word."""
        return Source(f"{self.word(word).text}({', '.join(_arguments(values, named))})")

    def block(self, word: str, /, *values: Any, **named: Any) -> Source:
        """Return a call of a word of the vocabulary, one argument a line, and import the word."""
        return Source(f"{self.word(word).text}({_block(_arguments(values, named))})")

    def comment(self, text: str) -> None:
        """Add a comment above the next field."""
        self._lines.append(f"# {text}")

    def put(self, name: str, value: Any) -> None:
        """Add a field of the scenario."""
        self._lines.append(f"{name}={literal(value)},")

    def text(self, about: str) -> str:
        """Return the text of the scenario file. about: its docstring.

        Raises `SyntaxError` if a `Source` was no Python.
        """
        self.word("Scenario")
        words = sorted(self._words, key=lambda word: (word.islower(), word))
        imports = f"from vllm_repro.vocabulary import ({_block(words)})"
        body = "".join(f"{_indented(line)}\n" for line in self._lines)
        made = f"{_docstring(about)}\n\n{imports}\n\nscenario = Scenario(\n{body})\n"
        ast.parse(made)
        return made


def literal(value: Any) -> str:
    """Return data as Python source in one line.

    value: strings, numbers, None, lists and dictionaries, nested at will. A `Source` is copied as
    it is; any other object becomes the string `str(value)`, quoted.
    """
    if isinstance(value, Source):
        return value.text
    if isinstance(value, Mapping):
        return (
            "{"
            + ", ".join(f"{literal(str(key))}: {literal(item)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, str):
        quoted = repr(value)
        return quoted if '"' in value or "\\" in quoted else f'"{quoted[1:-1]}"'
    return (
        repr(value)
        if value is None or isinstance(value, bool | int | float)
        else literal(str(value))
    )


def one_a_line(items: Iterable[Any]) -> Source:
    """Return the Python source of a list, with one item a line."""
    return Source(f"[{_block(map(literal, items))}]")


def command_text(text: str) -> Source:
    """Return the Python source of a command, as a string over several lines if possible."""
    body = _indented(text)
    made = '"""\n' + body.replace("\\", "\\\\").replace('"""', '\\"\\"\\"') + '\n"""'
    printable = all(char.isprintable() or char == "\n" for char in text)
    return Source(made if printable and ast.literal_eval(made) == f"\n{body}\n" else literal(text))


def _docstring(text: str) -> str:
    """Return the Python source of a docstring with this text."""
    inside = text.replace("\\", "\\\\").replace('"', '\\"')
    made = f'"""{inside}"""'
    return made if ast.literal_eval(made) == text else literal(text)


def _arguments(values: Iterable[Any], named: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a call as Python source, the named ones last."""
    return [*map(literal, values), *(f"{name}={literal(value)}" for name, value in named.items())]


def _block(parts: Iterable[str]) -> str:
    """Return what stands between two brackets, with one part a line."""
    return "\n" + "".join(f"{_indented(part)},\n" for part in parts)


def _indented(text: str) -> str:
    """Return `text` with four blanks in front of each line."""
    return "\n".join(f"    {line}" for line in text.split("\n"))
