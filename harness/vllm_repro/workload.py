"""What a trial asks of the server: ordered steps of requests, sized in tokens.

    workload=[
        chat(prompt=100, max_tokens=8),
        chat(prompt=BATCH + 3497, max_tokens=8),
        together(chat(prompt=500), chat(prompt=500)),
        pause(2.0),
    ]

Prompts are made to the exact length by the server's own `/tokenize` (see `vllm_repro.prompts`), chat template included, and salted
at their head, so that no prefix cache shortens them behind the scenario's back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_repro.sizes import Size

__all__ = ["Pause", "Request", "Step", "Together", "chat", "completion", "pause", "requests_of", "together"]


@dataclass(frozen=True)
class Request:
    """One request.

    endpoint: path below the server's root, `/v1/chat/completions` or `/v1/completions`.
    prompt: an exact length in tokens (template included), or a literal text.
    max_tokens: output budget. The answer is greedy (`temperature` 0) unless `fields` says otherwise.
    stream: ask for server-sent events. A plain request sees a death as an HTTP 500, a stream as an error event after a 200.
    fields: further body fields, sent as they are.
    """

    endpoint: str
    prompt: int | Size | str
    max_tokens: int = 8
    stream: bool = True
    name: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        size = repr(self.prompt) if isinstance(self.prompt, str) else f"{self.prompt} tokens"
        extra = "".join(f", {key}={value}" for key, value in self.fields.items())
        return f"{self.name or self.endpoint.removeprefix('/v1/')} of {size}{extra}"


@dataclass(frozen=True)
class Together:
    """Requests in flight at the same time."""

    requests: tuple[Request, ...]

    def __str__(self) -> str:
        return " beside ".join(map(str, self.requests))


@dataclass(frozen=True)
class Pause:
    """Nothing for some seconds."""

    seconds: float

    def __str__(self) -> str:
        return f"pause of {self.seconds:g} s"


Step = Request | Together | Pause


def _checked(prompt: int | Size | str, max_tokens: int) -> None:
    if isinstance(prompt, str) and re.fullmatch(r"\s*[\d.,_]+\s*[kKmM]?\s*", prompt):
        raise ValueError(f"the prompt {prompt!r} is a text; a size in tokens is a number without quotes")
    if isinstance(prompt, int) and prompt < 1:
        raise ValueError(f"a prompt of {prompt} tokens cannot be sent")
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens}: the server needs at least 1")


def _frozen(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Lists as tuples, so that two declarations of the same request are equal however they were read."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def chat(
    *, prompt: int | Size | str, max_tokens: int = 8, stream: bool = True, name: str = "", **fields: Any
) -> Request:
    """A chat completion with one user message; `prompt` counts the chat template too."""
    _checked(prompt, max_tokens)
    return Request("/v1/chat/completions", prompt, max_tokens, stream, name, _frozen(fields))


def completion(
    *, prompt: int | Size | str, max_tokens: int = 8, stream: bool = False, name: str = "", **fields: Any
) -> Request:
    """A text completion."""
    _checked(prompt, max_tokens)
    return Request("/v1/completions", prompt, max_tokens, stream, name, _frozen(fields))


def together(*requests: Request) -> Together:
    """These requests at the same time; the step ends when the last one has."""
    if len(requests) < 2:
        raise ValueError("together() takes two requests or more")
    return Together(requests)


def pause(seconds: float) -> Pause:
    """Waits, with everything still being watched."""
    if seconds < 0:
        raise ValueError("pause() takes seconds, 0 or more")
    return Pause(seconds)


def requests_of(steps: tuple[Step, ...]) -> Iterator[Request]:
    """Every request of a workload, in order."""
    for step in steps:
        if isinstance(step, Request):
            yield step
        elif isinstance(step, Together):
            yield from step.requests
