"""Reader of an answer: the bytes of a body or an event stream in, an `Answer` out.

The callers do input, output and clocks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from vllm_repro.client.answer import WHOLE, Answer, Usage

MOST_BYTES = 64 << 20
"""Longest answer that is read: a broken server may never stop sending."""
_OTHER_EVENTS = 100
"""Events of a stream beyond one for each token: roles, usage, the end of a choice."""


class EndlessAnswerError(Exception):
    """The server sends more than an answer may hold."""


@dataclass
class Received:
    """Reader of one answer, with what has arrived so far. Times are seconds since the epoch."""

    # the endpoint returns choices, as all completions do
    choices: bool = True
    # the request asked for a stream
    streamed: bool = False
    # most events that the answer may have
    most: float = math.inf
    status: int | None = None
    # the response is an event stream: asked for, status 200, and not JSON, which is one body
    event_stream: bool = False
    # bytes of the body so far
    size: int = 0
    # bytes of a body, or of an unfinished line of a stream
    pending: bytearray = field(default_factory=bytearray)
    # events of a stream so far, `[DONE]` included
    events: int = 0
    text: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    tokens: list[int | str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    usage: Usage | None = None
    finish: str | None = None
    error: str | None = None
    error_kind: str | None = None
    # 4xx code of an error event
    refused: int | None = None
    done: bool = False

    @classmethod
    def of(cls, path: str, body: Mapping[str, Any]) -> Received:
        """Return the reader for the answer to a request to `path`, with nothing received yet."""
        return cls(
            choices=path.endswith("/completions"),
            streamed=bool(body.get("stream")),
            most=_most_events(body),
        )

    def begin(self, status: int, content_type: str) -> None:
        """Take the status and content type of the response."""
        self.status = status
        self.event_stream = self.streamed and status == 200 and "json" not in content_type

    def feed(self, piece: bytes, now: float) -> None:
        """Take bytes of the body that arrived at `now`.

        Raises `EndlessAnswerError` after 64 MiB, or too many events.
        """
        self.size += len(piece)
        if self.size > MOST_BYTES:
            raise EndlessAnswerError(f"response is larger than {MOST_BYTES >> 20} MiB")
        self.pending += piece
        if self.event_stream and b"\n" in piece:
            *lines, self.pending = self.pending.split(b"\n")
            for line in lines:
                self._take_line(line, now)

    def end(self, now: float) -> None:
        """Take the end of the response: parse a plain body, or a stream's last line."""
        if self.event_stream:
            self._take_line(self.pending, now)
        elif self.status is not None:
            self._take_body(self.status, self.pending, now)
        if not self.choices and self.error is None and (self.done or self.events):
            self.done, self.finish = True, WHOLE

    def fail(self, kind: str, text: str) -> None:
        """Record an error, unless there is one. kind: "body", "event" or "transport"."""
        if self.error is None:
            self.error, self.error_kind = text, kind

    def answer(self, sent: float, ended: float, written: float | None = None) -> Answer:
        """Return what was received as an `Answer`.

        sent, ended, written: times of the request; `written` as in `Answer`.
        """
        return Answer(
            sent=sent,
            ended=ended,
            written=written,
            status=self.refused or self.status,
            error=self.error,
            error_kind=self.error_kind,
            finish_reason=self.finish,
            done=self.done,
            usage=self.usage,
            text="".join(self.text),
            token_times=tuple(self.times),
            streamed=self.streamed,
            arrivals=tuple(self.arrivals),
            tokens=tuple(self.tokens),
            margins=tuple(self.margins),
        )

    def _take_line(self, line: bytes | bytearray, now: float) -> None:
        """Take a line of an event stream: a JSON event, an error event or `[DONE]`.

        Ignore other lines. Raises `EndlessAnswerError` after too many events.
        """
        if not line.startswith(b"data:"):
            return
        self.events += 1
        if self.events > self.most:
            raise EndlessAnswerError(f"the stream goes on after {self.most} events")
        data = line[5:].strip()
        event = None if data == b"[DONE]" else _json(data)
        if data == b"[DONE]":
            self.done = True
        elif not isinstance(event, dict):
            self.fail(
                "event",
                f"stream event is not a JSON object: {data[:200].decode('utf-8', 'replace')}",
            )
        elif event.get("error") is not None:
            code = event["error"].get("code") if isinstance(event["error"], dict) else None
            self.refused = code if isinstance(code, int) and 400 <= code < 500 else None
            self.error = _error_text(event) or "error event without a message"
            self.error_kind = "body" if self.refused else "event"
        else:
            self._take(event, _choices(event), now)

    def _take_body(self, status: int, raw: bytes | bytearray, now: float) -> None:
        """Take the whole body of an answer that is not streamed, or of an error.

        Set `done`, or record an error: another status than 200, a body that is no JSON object, or
        one with `error`. Of several choices only the first counts.
        """
        body = _json(raw)
        if status == 200 and not self.choices and not isinstance(body, dict):
            self.done = True  # a list, a text, numbers, or nothing: any content is an answer
        elif status != 200 or not isinstance(body, dict):
            text = (
                _error_text(body)
                or raw.decode("utf-8", "replace")[:2000]
                or f"HTTP {status} with an empty body"
            )
            self.fail("body", text)
        elif body.get("error") is not None and "choices" not in body:
            self.fail("body", _error_text(body) or "error without a message")
        else:
            self.done = True
            self._take(body, _choices(body)[:1], now)

    def _take(self, body: Mapping[str, Any], choices: list[dict[str, Any]], now: float) -> None:
        """Add the usage, text and tokens of a body or stream event, as arrived `now`."""
        if "usage" in body or "response" in body:
            self.usage = _usage(body) or self.usage
        for choice in choices:
            piece = str(
                choice.get("text") or _message_text(choice.get("delta") or choice.get("message"))
            )
            self.arrivals.append(now)
            ids = choice.get("token_ids")
            if isinstance(ids, list) and all(isinstance(token, int) for token in ids):
                self.tokens += ids
            elif piece:
                self.tokens.append(piece)
            if choice.get("logprobs"):
                self.margins += _margins(choice)
            if piece:
                self.text.append(piece)
                self.times.append(now)
            self.finish = choice.get("finish_reason") or self.finish


def _json(data: bytes | bytearray) -> Any:
    """Return decoded JSON, NaN and broken UTF-8 accepted; None if it cannot be decoded."""
    try:
        return msgspec.json.decode(data)  # noqa: TID251  # safe between threads: it has no type
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(data.decode("utf-8", "replace"))  # takes NaN and broken UTF-8 too
    except (ValueError, RecursionError):
        return None


def _most_events(body: Mapping[str, Any]) -> float:
    """Return the most events that a request's stream may have; infinite if not known.

    A scenario may state any value.
    """
    tokens, choices = body.get("max_tokens"), body.get("n", 1)
    if not isinstance(tokens, int) or not isinstance(choices, int):
        return math.inf
    return max(1, tokens) * max(1, choices) + _OTHER_EVENTS


def _choices(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the well-formed `choices` of a body or event. A broken server may send others."""
    choices = body.get("choices")
    return (
        [choice for choice in choices if isinstance(choice, dict)]
        if isinstance(choices, list)
        else []
    )


def _margins(choice: Mapping[str, Any]) -> tuple[float, ...]:
    """Return nats by which each token was likelier than the second best.

    Empty without `logprobs`, or if one token has no second.
    """
    logprobs = choice.get("logprobs")
    try:
        if isinstance(logprobs, dict) and isinstance(content := logprobs.get("content"), list):
            best = [[top["logprob"] for top in token["top_logprobs"]] for token in content]
        else:
            best = (
                [list(top.values()) for top in logprobs["top_logprobs"]]
                if isinstance(logprobs, dict)
                else []
            )
        ordered = [sorted(map(float, top), reverse=True) for top in best]
        return tuple(first - second for first, second, *_ in ordered)
    except (LookupError, TypeError, ValueError, AttributeError):
        return ()


def _message_text(message: Any) -> str:
    """Return the text of a chat message or delta, reasoning and tool calls included.

    Empty if malformed. Without the ids of calls, which are random.
    """
    if not isinstance(message, dict):
        return ""
    functions = [
        call["function"]
        for calls in [message.get("tool_calls")]
        for call in (calls if isinstance(calls, list) else ())
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    ]
    # A reasoning parser moves text to another field, and releases name that field differently.
    keys = ("reasoning_content", "reasoning", "content", "name", "arguments")
    return "".join(str(part.get(key) or "") for part in (message, *functions) for key in keys)


def _usage(body: Mapping[str, Any]) -> Usage | None:
    """Return the token counts in an answer or stream event; None if it has none.

    Some endpoints use `input` for `prompt`, or nest the counts of a stream in `response`.
    """
    inner = body.get("response")
    usage = body.get("usage") or (inner.get("usage") if isinstance(inner, dict) else None)
    if not isinstance(usage, dict):
        return None
    prompt, completion = (
        ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    )
    if not isinstance(usage.get(f"{prompt}_tokens"), int):
        return None
    details = usage.get(f"{prompt}_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    known = isinstance(cached, int) and cached >= 0  # vLLM may send -1 for a request that never ran
    return Usage(
        prompt_tokens=usage[f"{prompt}_tokens"],
        completion_tokens=usage.get(f"{completion}_tokens") or 0,
        cached_tokens=cached if known else None,
    )


def _error_text(body: Any) -> str | None:
    """Return the message in an error body, and the parameter it names; None if no object."""
    if not isinstance(body, dict):
        return None
    error = body.get("error", body)
    if isinstance(error, dict):
        text = str(error.get("message") or error.get("detail") or error)
        named = error.get("param")
        return (
            f"{text} (parameter={named})" if isinstance(named, str) and named not in text else text
        )
    return str(error)
