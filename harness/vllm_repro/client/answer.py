"""Record of what one request received."""

from __future__ import annotations

from dataclasses import dataclass

WHOLE = "whole"
"""`finish_reason` of a complete answer without choices, such as an embedding."""

DEAD_MESSAGE = "EngineCore encountered an issue."
DEAD_MESSAGES = (DEAD_MESSAGE, "The server had an error while processing your request.")
"""Beginnings of vLLM's errors for requests in flight when its engine dies.

The first is that of releases up to 0.32.0, the second that of releases from 0.33.0 on.
"""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Token counts that the server reports for one answer."""

    prompt_tokens: int
    completion_tokens: int
    # prompt tokens from the prefix cache; None if the server does not report them
    cached_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Response to one request: status, text, tokens, usage, error, times in epoch seconds."""

    sent: float
    ended: float
    # when the request was written, if the kernel stamped all that came back; else None
    written: float | None = None
    # HTTP status; None without a status line. An error event with a 4xx code replaces the 200 of
    # its stream, because newer vLLM rejects requests that way.
    status: int | None = None
    # error text
    error: str | None = None
    # source of the error text: a "body", an "event" in a stream, or the "transport"
    error_kind: str | None = None
    # None if the server sent none; `WHOLE` for a complete answer without choices
    finish_reason: str | None = None
    # a whole body or `[DONE]` was received
    done: bool = False
    usage: Usage | None = None
    text: str = ""
    # time of each piece with text: a token that is part of a character has no text yet
    token_times: tuple[float, ...] = ()
    # the request asked for a stream
    streamed: bool = False
    # time of each streamed piece, with or without text; one piece is one engine step
    arrivals: tuple[float, ...] = ()
    # token ids if the server returned them, else the text of each piece
    tokens: tuple[int | str, ...] = ()
    # log probability of each token minus that of the second best token, in nats; needs `logprobs`
    # in the request
    margins: tuple[float, ...] = ()

    @property
    def ok(self) -> bool:
        """Return True for a complete, non-empty success."""
        return (
            self.status == 200
            and self.error is None
            and self.finish_reason is not None
            and not self.empty
        )

    @property
    def empty(self) -> bool:
        """Return True for a success without text or tokens.

        A complete answer without choices, such as an embedding, is not empty.
        """
        counted = self.usage.completion_tokens if self.usage else 0
        content = self.text or counted or self.finish_reason == WHOLE
        return self.status == 200 and self.error is None and not content

    @property
    def names_dead_engine(self) -> bool:
        """Return True if the error is vLLM's message for a dead engine.

        It counts only in a stream or with status 5xx: a 400 may quote a prompt.
        """
        failed = (self.status or 0) >= 500 or (self.status == 200 and self.error_kind == "event")
        return failed and any(text in (self.error or "") for text in DEAD_MESSAGES)
