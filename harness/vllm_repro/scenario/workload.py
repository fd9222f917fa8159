"""Workload of a trial: ordered steps of requests, sized in tokens.

    workload=[
        chat(prompt=100, max_tokens=8),
        chat(prompt=BATCH + 3497, max_tokens=8),
        together(chat(prompt=500), chat(prompt=500)),
        pause(2.0),
        rest(within=30),
        conversation(first=700, adds=[100, 600]),
        request(path="/v1/embeddings", body={"input": [1, 2, 3]}),
    ]

The server's `/tokenize` makes prompts of the exact length, chat template included (see
`vllm_repro.client.prompts`). A salt at the head keeps them out of the prefix cache. A size such as
`flag("--max-num-batched-tokens") + 129` is resolved against an arm's command, so an arm that edits
the flag moves the boundary too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from vllm_repro.command.command import ServeCommand
from vllm_repro.errors import ScenarioError

IDLE_AFTER = 5.0
"""Seconds without work after which an engine counts as idle."""


@dataclass(frozen=True)
class Size:
    """Size in tokens that depends on the arm: `times` x the value of its flag `flag` + `plus`.

    If `lab` is set, `flag` is empty: the size is `lab` in the lab, and `plus` elsewhere.
    """

    flag: str
    times: int = 1
    plus: int = 0
    # Size in the lab, if it differs; `flag` is then empty, and elsewhere the size is `plus`.
    lab: int | None = None

    def __add__(self, other: int) -> Size:
        return Size(
            self.flag, self.times, self.plus + other, None if self.lab is None else self.lab + other
        )

    def __sub__(self, other: int) -> Size:
        return self + -other

    def __mul__(self, other: int) -> Size:
        return Size(
            self.flag,
            self.times * other,
            self.plus * other,
            None if self.lab is None else self.lab * other,
        )

    __rmul__ = __mul__
    __radd__ = __add__

    def __str__(self) -> str:
        if self.lab is not None:
            return f"{self.plus} (in the lab {self.lab})"
        scaled = self.flag if self.times == 1 else f"{self.times} x {self.flag}"
        return (
            scaled
            if not self.plus
            else f"{scaled} {'+' if self.plus > 0 else '-'} {abs(self.plus)}"
        )


def flag(name: str) -> Size:
    """Return the number given for a flag, as a size: `flag("--max-num-batched-tokens") + 129`.

    Raises `ValueError` for a name without `--`.
    """
    if not name.startswith("--"):
        raise ValueError(
            "flag() takes a flag as it is written on the command line, such as"
            f" '--{name.lstrip('-')}'"
        )
    return Size(name)


def sized(tokens: int, *, lab: int) -> Size:
    """Return the reported size, and its equivalent in the lab: `sized(90_109, lab=5_693)`.

    Both are in tokens. The lab has a smaller model and pool. Raises `ValueError` below 1.
    """
    if lab < 1 or tokens < 1:
        raise ValueError("sized(…, lab=…) takes two numbers of tokens, 1 or more")
    return Size("", plus=tokens, lab=lab)


def resolve(size: int | Size, command: ServeCommand, *, in_lab: bool = False) -> int:
    """Return `size` in tokens for this command.

    Raises `ScenarioError` if the command does not have the flag.
    """
    if isinstance(size, int):
        return size
    if size.lab is not None:
        return size.lab if in_lab else size.plus
    value = command.number(size.flag)
    if value is None:
        raise ScenarioError(
            f"a prompt is sized by {size.flag}, which the command does not carry",
            hint=f"give the arm {size.flag}, or state the size as a number",
        )
    return size.times * value + size.plus


@dataclass(frozen=True)
class Request:
    """One HTTP request of a workload: its endpoint, prompt, answer length and timing.

    A crash is an HTTP 500 for a plain request, and an error event after a 200 for a stream.
    """

    # Path of the URL.
    endpoint: str
    # Length in tokens (template included), a text, or token ids; None if `fields` is the whole
    # body.
    prompt: int | Size | str | tuple[int, ...] | None
    # Most tokens of the answer, which is greedy (`temperature` 0) unless `fields` changes it.
    max_tokens: int | Size = 8
    # The answer comes as server-sent events.
    stream: bool = True
    # For reports and triggers; see `label`.
    name: str = ""
    # Further body fields.
    fields: Mapping[str, Any] = field(default_factory=dict)
    # Leading tokens that all sharing completions have in common.
    shared: int | Size = 0
    # Name of the conversation that this is a turn of; empty for a single request.
    conversation: str = ""
    # Statuses of an error that is no failure, such as the refusal of a fixed release.
    may_fail: tuple[int, ...] = ()
    # Seconds from the start of its step.
    starts_after: float = 0
    # Seconds after which the client closes the connection; None: it stays.
    leaves_after: float | None = None

    def __post_init__(self) -> None:
        if not all(400 <= status < 600 for status in self.may_fail):
            raise ValueError("may_fail=[…] holds statuses of errors, 400 to 599")
        if self.starts_after < 0 or (self.leaves_after is not None and self.leaves_after <= 0):
            raise ValueError("starts_after is 0 or more seconds, leaves_after more than 0")

    @property
    def label(self) -> str:
        """Name in reports, and for the conditions of a trigger."""
        return self.name or self.endpoint.removeprefix("/v1/")

    @property
    def ids(self) -> tuple[int, ...]:
        """Token ids of the prompt; empty if the scenario does not state them."""
        stated = self._stated
        return (
            stated
            if isinstance(stated, tuple) and all(isinstance(token, int) for token in stated)
            else ()
        )

    @property
    def one_prompt(self) -> bool:
        """False if the body may hold several prompts: `usage` is then their sum."""
        stated = self._stated
        single = isinstance(stated, tuple) and all(isinstance(part, int | dict) for part in stated)
        return self.prompt is not None or single or isinstance(stated, str)

    @property
    def _stated(self) -> object:
        """Return the prompt as the scenario states it, also one inside a whole body; else None."""
        values = (self.fields[key] for key in ("messages", "prompt", "input") if key in self.fields)
        return next(values, None) if self.prompt is None else self.prompt

    def __str__(self) -> str:
        if self.prompt is None:
            return f"{self.label} with {', '.join(self.fields) or 'an empty body'}"
        size = f"{len(self.ids)} token ids" if self.ids else f"{self.prompt} tokens"
        size = repr(self.prompt) if isinstance(self.prompt, str) else size
        shared = f", {self.shared} of them shared" if self.shared else ""
        extra = "".join(f", {key}={value}" for key, value in self.fields.items() if key != "tools")
        leaves = (
            ""
            if self.leaves_after is None
            else f", whose client leaves after {self.leaves_after:g} s"
        )
        return f"{self.label} of {size}{shared}{extra}{leaves}"


@dataclass(frozen=True)
class Together:
    """Requests in flight at the same time."""

    requests: tuple[Request, ...]

    def __str__(self) -> str:
        return " beside ".join(map(str, self.requests))


@dataclass(frozen=True)
class Conversation:
    """Turns of one growing chat, in order; each prompt holds all messages before it."""

    turns: tuple[Request, ...]

    def __str__(self) -> str:
        return f"conversation of {len(self.turns)} turns"


@dataclass(frozen=True)
class Pause:
    """Step of a workload: a wait of some seconds."""

    seconds: float

    def __str__(self) -> str:
        return f"pause of {self.seconds:g} s"


@dataclass(frozen=True)
class Rest:
    """Step of a workload: a wait until the engine is idle.

    One still busy after `within` seconds counts as never idle, which is a hang.
    """

    within: float

    def __str__(self) -> str:
        return f"rest, within {self.within:g} s"


Step = Request | Together | Conversation | Pause | Rest


def _check_request(prompt: int | Size | str | Sequence[int], max_tokens: int | Size) -> None:
    """Raise `ValueError` if a prompt or an answer length is wrong."""
    if isinstance(prompt, Sequence) and not prompt:
        raise ValueError("an empty prompt cannot be counted: send it with request(…)")
    if isinstance(prompt, str) and re.fullmatch(r"\s*[\d.,_]+\s*[kKmM]?\s*", prompt):
        raise ValueError(
            f"the prompt {prompt!r} is a text; a size in tokens is a number without quotes"
        )
    if isinstance(prompt, int) and prompt < 1:
        raise ValueError(f"a prompt of {prompt} tokens cannot be sent")
    if isinstance(max_tokens, int) and max_tokens < 1:
        raise ValueError(
            f"max_tokens={max_tokens}: the server needs at least 1; request(…) sends any value"
        )


def _frozen(value: Any) -> Any:
    """Turn lists into tuples, at any depth, so that equal declarations compare equal."""
    match value:
        case dict():
            return {key: _frozen(inner) for key, inner in value.items()}
        case list() | tuple():
            return tuple(_frozen(inner) for inner in value)
    return value


def chat(
    *,
    prompt: int | Size | str,
    max_tokens: int | Size = 8,
    stream: bool = True,
    name: str = "",
    may_fail: Sequence[int] = (),
    **fields: Any,
) -> Request:
    """Return a chat completion with one user message; `prompt` counts the chat template too.

    fields: further body fields. Raises `ValueError` for a wrong size.
    """
    _check_request(prompt, max_tokens)
    return Request(
        "/v1/chat/completions",
        prompt,
        max_tokens,
        stream,
        name,
        _frozen(fields),
        may_fail=tuple(may_fail),
    )


def completion(
    *,
    prompt: int | Size | str | Sequence[int],
    shared: int | Size = 0,
    max_tokens: int | Size = 8,
    stream: bool = False,
    name: str = "",
    may_fail: Sequence[int] = (),
    starts_after: float = 0,
    leaves_after: float | None = None,
    **fields: Any,
) -> Request:
    """Return a request for a text completion.

    Its first `shared` tokens are the same in all completions of the trial that share some, so that
    the prefix cache has them.

    prompt: a list holds token ids, which are sent unchanged. starts_after: seconds of delay among
    requests sent together. leaves_after: seconds after which its client closes the connection; not
    for a stream. fields: further body fields. Raises `ValueError` for arguments that do not fit.
    """
    _check_request(prompt, max_tokens)
    if stream and leaves_after is not None:
        raise ValueError("leaves_after is for an answer in one piece: leave stream out")
    prompt = prompt if isinstance(prompt, int | Size | str) else tuple(prompt)
    if shared and isinstance(prompt, str | tuple):
        raise ValueError("shared counts tokens of a prompt that is stated as a size")
    if isinstance(shared, int) and isinstance(prompt, int) and not 0 <= shared <= prompt:
        raise ValueError(f"a prompt of {prompt} tokens cannot share {shared} of them")
    return Request(
        "/v1/completions",
        prompt,
        max_tokens,
        stream,
        name,
        _frozen(fields),
        shared,
        may_fail=tuple(may_fail),
        starts_after=starts_after,
        leaves_after=leaves_after,
    )


def request(
    *,
    path: str,
    body: Mapping[str, Any],
    name: str = "",
    may_fail: Sequence[int] = (),
    starts_after: float = 0,
) -> Request:
    """Return a POST of this JSON body to any endpoint of the server.

        request(path="/v1/embeddings", body={"input": "hello"})

    A body without `model` gets the served model. `"stream": True` asks for a stream, as in the API.
    starts_after: as of `completion`. Raises `ValueError` for a path without a slash in front.
    """
    if not path.startswith("/"):
        raise ValueError(f"path={path!r} must be a path of the server, such as '/v1/embeddings'")
    fields = _frozen(body)
    stream = bool(body.get("stream"))
    return Request(
        path, None, 0, stream, name, fields, may_fail=tuple(may_fail), starts_after=starts_after
    )


def conversation(
    *,
    first: int | Size,
    adds: Sequence[int],
    tools: Sequence[Mapping[str, Any]] = (),
    max_tokens: int | Size = 8,
    stream: bool = True,
    name: str = "turn",
) -> Conversation:
    """Return a chat whose first prompt has `first` tokens, and that grows by each of `adds`.

    Each growth is a reply and a user message, in tokens. With `tools` (schemas, as in the API) each
    reply calls the first tool and the next message is its result. Replies are fixed texts: random
    weights would break a tool's schema and make the lengths random.
    """
    _check_request(first, max_tokens)
    if not adds or min(adds) < 1:
        raise ValueError("adds=[…] holds what each further turn adds, in tokens")
    fields = {"tools": _frozen(list(tools))} if tools else {}
    sizes = [first + sum(adds[:turn]) for turn in range(len(adds) + 1)]
    endpoint = "/v1/chat/completions"
    return Conversation(
        tuple(
            Request(
                endpoint, size, max_tokens, stream, f"{name} {number}", fields, conversation=name
            )
            for number, size in enumerate(sizes, 1)
        )
    )


def together(*requests: Request) -> Together:
    """Return a step that sends these requests at the same time and ends with the last answer.

    Raises `ValueError` for fewer than two.
    """
    if len(requests) < 2:
        raise ValueError("together() takes two requests or more")
    return Together(requests)


def at_once(
    count: int, *, prompt: Sequence[int], max_tokens: int | Size = 8, spread: bool = False
) -> Together:
    """Return a step that sends `count` chats at the same time, with the sizes of `prompt` in turn.

    The third has the name `3 of 9000` if its prompt has 9,000 tokens.

    prompt: sizes in tokens. spread: the sizes rise or fall evenly from the first of `prompt` to the
    last instead. Raises `ValueError` for fewer than two chats.
    """
    if not prompt:
        raise ValueError("at_once(…) takes the sizes of its prompts, as in prompt=[900, 9000]")
    even = (prompt[0] + (prompt[-1] - prompt[0]) * at // max(1, count - 1) for at in range(count))
    return together(
        *(
            chat(prompt=size, max_tokens=max_tokens, stream=False, name=f"{number} of {size}")
            for number, size in zip(
                range(1, count + 1), even if spread else cycle(prompt), strict=False
            )
        )
    )


def pause(seconds: float) -> Pause:
    """Return a step that waits some seconds; the server is still watched."""
    if seconds < 0:
        raise ValueError("pause() takes seconds, 0 or more")
    return Pause(seconds)


def rest(*, within: float) -> Rest:
    """Return a step that waits until EngineCore is idle for `IDLE_AFTER` seconds.

    Idle means that it uses almost no processor time. An engine still busy after `within` seconds is
    never idle: a hang. See `vllm_repro.running.idle`. Raises `ValueError` if `within` is less than
    `IDLE_AFTER`.
    """
    if within < IDLE_AFTER:
        raise ValueError(
            f"rest() takes within={IDLE_AFTER:g} or more seconds: idle means that long without work"
        )
    return Rest(within)


def requests_of(steps: tuple[Step, ...]) -> Iterator[Request]:
    """Yield every request of a workload's steps, in order."""
    for step in steps:
        if isinstance(step, Request):
            yield step
        elif isinstance(step, Together):
            yield from step.requests
        elif isinstance(step, Conversation):
            yield from step.turns
