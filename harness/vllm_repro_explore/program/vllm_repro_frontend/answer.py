"""Answers of a model, with what a client should receive, and the tokens that they arrive in."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from .formats import REASONING, STARTED_BY_PROMPT, TOOL_FORMATS, Call

Schemas = dict[str, dict[str, dict[str, Any]]]
"""JSON schema of each parameter, by tool and parameter."""
TOOLS: Schemas = {
    "get_weather": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "metric": {"type": "boolean"},
    },
    "save_note": {
        "text": {"type": "string"},
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "meta": {"type": "object"},
        "score": {"type": "number"},
    },
    "ping": {},
}
"""Tools that an answer may call."""

_PLAIN = ("Berlin", "New York, NY")
_TEXTS = (
    *_PLAIN,
    *("", '"so"', "x < y", "{brace}", "[1, 2]", "line\nbreak", "日本語", "café", "🙂 ok", "C:\\a"),
    *("3", "true", "null", "it's", "a=b, c", "</b>", "100%", "tab\there"),
)
_REASONING = ("I think about it.", "Let me see.\nYes.", "x < y, so <b>")
_CONTENT = ("Hello there.", "It is fine. 🙂", "a < b and [c]", "Line\n\nLine")
_MARKER = re.compile(r"</?[^<>\s=\"]+>|<[|｜][^<>\s]+[|｜]>|<(?:function|param)(?= name)")
"""Tags and control words: a model has one token for each."""
_TOKEN = re.compile(rf"{_MARKER.pattern}| ?[^\W\d]+|\d| ?[^\w\s<]+|\s+|.", re.DOTALL)


_PART = re.compile(r"\w+|\W")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer of a model with a tool parser, a reasoning parser, or both."""

    tool: str | None
    reasoning_parser: str | None
    # True if the prompt ends with the start of reasoning
    thinks: bool = False
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Return the text that the model generates."""
        start, end = REASONING.get(self.reasoning_parser or "", ("", ""))
        thought = ("" if self.thinks else start) + self.reasoning + end
        written = TOOL_FORMATS[self.tool].text(self.calls) if self.tool else ""
        return (thought if self.reasoning_parser else "") + self.content + written

    @property
    def tools(self) -> Schemas:
        """Return the tools of the request, with those parameters that the answer gives."""
        tools: Schemas = {}
        for name, arguments in self.calls or [("ping", {})]:
            tools.setdefault(name, {}).update({key: TOOLS[name][key] for key in arguments})
        return tools

    def simpler(self) -> Iterator[Answer]:
        """Yield answers with less in them, the greatest steps first."""
        for index, (name, arguments) in enumerate(self.calls):
            rest = self.calls[:index], self.calls[index + 1 :]
            yield replace(self, calls=[*rest[0], *rest[1]])
            for key, value in arguments.items():
                fewer = {other: arguments[other] for other in arguments if other != key}
                yield replace(self, calls=[*rest[0], (name, fewer), *rest[1]])
                if isinstance(value, str) and value not in ("", "a"):
                    shorter = arguments | {key: "a"}
                    yield replace(self, calls=[*rest[0], (name, shorter), *rest[1]])
        if self.content:
            yield replace(self, content="")
            if self.content != "Hi":
                yield replace(self, content="Hi")
        if self.reasoning not in ("", "So"):
            yield replace(self, reasoning="So")


def draw(rng: Random, tool: str | None, reasoning_parser: str | None) -> Answer:
    """Return a random answer for these parsers, every second time with texts that need care."""
    hard = rng.random() < 0.5
    calls: list[Call] = []
    written = TOOL_FORMATS[tool] if tool else None
    if written and rng.random() < 0.8:
        names = rng.choices(list(TOOLS), k=min(written.most, rng.choice([1, 1, 2, 3])))
        calls = [(name, _arguments(rng, name, hard)) for name in names]
    after_text = written is None or written.after_text
    contents = _CONTENT if hard else _CONTENT[:1]
    content = rng.choice(["", *contents] if after_text else [""]) if calls else rng.choice(contents)
    return Answer(
        tool=tool,
        reasoning_parser=reasoning_parser,
        thinks=reasoning_parser in STARTED_BY_PROMPT
        or (bool(reasoning_parser) and rng.random() < 0.3),
        reasoning=rng.choice(_REASONING if hard else _REASONING[:1]) if reasoning_parser else "",
        content=content,
        calls=calls,
    )


def _arguments(rng: Random, name: str, hard: bool) -> dict[str, Any]:
    """Return random arguments of a tool."""

    def text() -> str:
        return rng.choice(_TEXTS if hard else _PLAIN)

    draws: dict[str, Callable[[], Any]] = {
        "string": text,
        "integer": lambda: rng.choice([0, 3, -7, 1234567]),
        "boolean": lambda: rng.random() < 0.5,
        "number": lambda: rng.choice([0.5, -1.25, 2]),
        "array": lambda: [text() for _ in range(rng.randrange(3))],
        "object": lambda: rng.choice([{}, {"k": text(), "n": rng.randrange(9)}]),
    }
    kept = [key for index, key in enumerate(TOOLS[name]) if not index or rng.random() < 0.7]
    return {key: draws[TOOLS[name][key]["type"]]() for key in kept}


def tokens_of(text: str) -> list[str]:
    """Return the tokens of a text: tags and control words, words, digits, punctuation, spaces."""
    return _TOKEN.findall(text)


def split_tags(tokens: list[str], kept: Collection[str]) -> list[str]:
    """Return the tokens with tags and control words in parts, but for those of `kept`."""
    parts: list[str] = []
    for token in tokens:
        is_tag = token not in kept and _MARKER.fullmatch(token)
        parts += _PART.findall(token) if is_tag else [token]
    return parts


def markers_of(text: str) -> list[str]:
    """Return the tags and control words of a text, each once, sorted."""
    return sorted(set(_MARKER.findall(text)))
