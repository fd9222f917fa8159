"""vLLM's parsers: a whole answer, and the same answer in deltas as the chat endpoint streams it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from .answer import Answer, Schemas, markers_of, split_tags, tokens_of
from .formats import REASONING, TOOL_FORMATS
from .limit import limited
from .tokenizer import make, needed_tokens

Deltas = Sequence[Sequence[str]]
"""Tokens of each delta."""
EOS = "<eos>"
"""Token that ends each answer; a server streams no text for it."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """Message that a client receives, without spaces at the ends of its texts."""

    reasoning: str
    content: str
    # name and arguments of each call: a JSON value in one spelling, or the text if it is none
    calls: tuple[tuple[str, str], ...]

    def difference(self, other: Message) -> str:
        """Return the first field that differs, the gravest first; empty if none does."""
        if [name for name, _ in self.calls] != [name for name, _ in other.calls]:
            return "tool calls"
        if self.calls != other.calls:
            return "arguments"
        if self.content != other.content:
            return "text"
        return "reasoning" if self.reasoning != other.reasoning else ""


def _message(
    reasoning: str | None, content: str | None, calls: Iterable[tuple[str, str]]
) -> Message:
    return Message(
        reasoning=(reasoning or "").strip(),
        content=(content or "").strip(),
        calls=tuple((name, _one_spelling(arguments)) for name, arguments in calls),
    )


def _one_spelling(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True, ensure_ascii=False)
    except ValueError:
        return arguments


def _request_tools(tools: Schemas) -> list[dict[str, Any]]:
    """Return tools as a request has them."""
    return [
        {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": properties}},
        }
        for name, properties in tools.items()
    ]


def expected(answer: Answer) -> Message:
    """Return what a client should receive of an answer."""
    calls = [(name, json.dumps(arguments)) for name, arguments in answer.calls]
    return _message(answer.reasoning, answer.content, calls)


class Parsers:
    """A tool parser, a reasoning parser, or both, as a server composes them.

    Raises what the parsers raise if they cannot be constructed.
    """

    def __init__(self, tool: str | None, reasoning: str | None) -> None:
        self.kind = ParserManager.get_parser(
            tool_parser_name=tool, reasoning_parser_name=reasoning, enable_auto_tools=True
        )
        self.start = REASONING.get(reasoning or "", ("", ""))[0]
        for method, argument in (("parse", "model_output_token_ids"), ("parse_delta", "finished")):
            if argument not in signature(getattr(self.kind, method)).parameters:
                raise ImportError(f"{self.kind.__name__}.{method} has no {argument}")
        with limited():
            self.looked_up = needed_tokens(self.kind)

    @property
    def modules(self) -> set[str]:
        """Return the names of the modules that have the parsers' code."""
        classes = self.kind, self.kind.tool_parser_cls, self.kind.reasoning_parser_cls
        return {base.__module__ for parser in classes if parser for base in parser.__mro__}

    def needed(self, answer: Answer) -> list[str]:
        """Return the tokens of a tokenizer for an answer: those needed, tags, parts and words."""
        tokens = tokens_of(answer.text)
        tags = markers_of(answer.text + self.start)
        return [*self.looked_up, *tags, *tokens, *split_tags(tokens, self.looked_up), EOS]

    def open(self, answer: Answer) -> Conversation:
        """Return a conversation in which the model gives this answer."""
        return Conversation(self, make(self.needed(answer)), answer)


class Conversation:
    """A request, and parsers for it. Each call takes the answer from its beginning."""

    def __init__(self, parsers: Parsers, tokenizer: Any, answer: Answer) -> None:
        self._parsers, self._tokenizer, self._answer = parsers, tokenizer, answer
        self.prompt = ["a", *tokens_of(parsers.start)] if answer.thinks else ["a"]

    @cached_property
    def tokens(self) -> list[str]:
        """Return the tokens of the answer; a tag is a token if the model has one for it."""
        written = TOOL_FORMATS.get(self._answer.tool or "")
        tokens = tokens_of(self._answer.text)
        return tokens if written is None or written.tags_are_tokens else self.parts

    @cached_property
    def parts(self) -> list[str]:
        """Return the tokens, with those tags in parts that the parsers look up as no token."""
        return split_tags(tokens_of(self._answer.text), self._parsers.looked_up)

    def _ids(self, tokens: Sequence[str]) -> list[int]:
        return list(self._tokenizer.convert_tokens_to_ids(list(tokens)))

    def _parser(self, stream: bool) -> tuple[Any, Any]:
        """Return a new request and a new parser."""
        request = ChatCompletionRequest(
            model="m",
            messages=[{"role": "user", "content": "a"}],
            tools=_request_tools(self._answer.tools) if self._answer.tool else None,
            stream=stream,
        )
        parser = self._parsers.kind(self._tokenizer, request.tools)
        return parser.adjust_request(request), parser

    def whole(self) -> Message:
        """Return the message that a client receives without streaming. Raises what vLLM raises."""
        with limited():
            request, parser = self._parser(stream=False)
            if hasattr(parser, "set_prompt_token_ids"):  # since 0.33
                parser.set_prompt_token_ids(self._ids(self.prompt))
            reasoning, content, calls = parser.parse(
                self._answer.text,
                request,
                enable_auto_tools=True,
                model_output_token_ids=self._ids([*self.tokens, EOS]),
            )
        return _message(
            reasoning, content, ((call.name, call.arguments or "") for call in calls or ())
        )

    def streamed(self, deltas: Deltas) -> Message:
        """Return the message that a client puts together from the deltas of a stream.

        Raises what vLLM raises.
        """
        reasoning, content = "", ""
        names: dict[int, str] = defaultdict(str)
        arguments: dict[int, str] = defaultdict(str)
        for delta in self._messages(deltas):
            content += delta.content or ""
            reasoning += delta.reasoning or ""
            for call in delta.tool_calls or ():
                function = call.function
                names[call.index] += (function and function.name) or ""
                arguments[call.index] += (function and function.arguments) or ""
        return _message(
            reasoning, content, ((names[index], arguments[index]) for index in sorted(names))
        )

    def _messages(self, deltas: Deltas) -> list[Any]:
        """Return what vLLM streams for each delta, without the deltas for which it is nothing."""
        prompt = self._ids(self.prompt)
        with limited():
            request, parser = self._parser(stream=True)
            messages = [
                parser.parse_delta(
                    "".join(token for token in tokens if token != EOS),
                    self._ids(tokens),
                    request,
                    prompt,
                    finished=number == len(deltas),
                )
                for number, tokens in enumerate(deltas, 1)
            ]
        return [message for message in messages if message is not None]
