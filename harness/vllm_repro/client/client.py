"""Asks a vLLM server, and keeps what it answers word for word.

An `Answer` is what one request saw, whatever happened: an HTTP error, a reset, a stream that carried an error event after its 200, one
that ended without a `finish_reason`, an empty success. Nothing is raised for these: they are the evidence. Nothing is retried either.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

__all__ = ["DEAD_MESSAGE", "Answer", "Client", "Usage"]

DEAD_MESSAGE = "EngineCore encountered an issue."
"""How the error begins that every vLLM gives for a request in flight when its engine dies."""


@dataclass(frozen=True)
class Usage:
    """The server's own count. cached_tokens: None where the server does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True)
class Answer:
    """What one request saw. Times are seconds since the epoch; token_times one a chunk that carried text.

    arrivals: when each piece of a streamed answer came, with text or without, which is one a step of the engine: a token that is half a
    letter has no text yet. tokens: ids where `return_token_ids` was asked for and the release knows it, else the text of each piece.
    margins: where `logprobs` were asked for, by how much each token was likelier than the next best one, in nats.
    status: HTTP status, None where no status line came; a stream's 200 gives way to the code of an error event that refuses the request,
    which is how newer servers answer 400 to one. error: the text of an error body, an error event in a stream, or the
    transport's own; error_kind names which ("body", "event", "transport"). finish_reason: None where the answer did not give one.
    """

    sent: float
    ended: float
    status: int | None = None
    error: str | None = None
    error_kind: str | None = None
    finish_reason: str | None = None
    done: bool = False
    usage: Usage | None = None
    text: str = ""
    token_times: tuple[float, ...] = ()
    streamed: bool = False
    arrivals: tuple[float, ...] = ()
    tokens: tuple[int | str, ...] = ()
    margins: tuple[float, ...] = ()

    @property
    def ok(self) -> bool:
        return self.status == 200 and self.error is None and self.finish_reason is not None and not self.empty

    @property
    def empty(self) -> bool:
        """A success that carries nothing: no text and, by its own usage, no token."""
        counted = self.usage.completion_tokens if self.usage else 0
        return self.status == 200 and self.error is None and not self.text and counted == 0

    @property
    def names_dead_engine(self) -> bool:
        return self.error is not None and DEAD_MESSAGE in self.error


@dataclass
class _Stream:
    """What has come of a stream so far."""

    text: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    tokens: list[int | str] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    usage: Usage | None = None
    finish: str | None = None
    error: str | None = None
    refused: int | None = None
    done: bool = False

    def feed(self, data: str) -> None:
        if data == "[DONE]":
            self.done = True
            return
        event = _json(data)
        if not isinstance(event, dict):
            self.error = self.error or f"a stream event that is no JSON object: {data[:200]}"
            return
        if "error" in event:
            self.error = _error_text(event) or "an error event without a message"
            code = event["error"].get("code") if isinstance(event["error"], dict) else None
            self.refused = code if isinstance(code, int) and 400 <= code < 500 else None
            return
        self.usage = _usage(event) or self.usage
        now = time.time()
        for choice in _choices(event):
            piece = choice.get("text") or _message_text(choice.get("delta"))
            self.arrivals.append(now)
            self.tokens += _tokens(choice, str(piece or ""))
            self.margins += _margins(choice)
            if piece:
                self.text.append(str(piece))
                self.times.append(now)
            self.finish = choice.get("finish_reason") or self.finish


def _json(data: str | bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _choices(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The choices of an answer, without whatever else stands where they should: what answers may be no vLLM, or a broken one."""
    choices = body.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _tokens(choice: Mapping[str, Any], text: str) -> list[int | str]:
    ids = choice.get("token_ids")
    if isinstance(ids, list) and all(isinstance(one, int) for one in ids):
        return list(ids)
    return [text] if text else []


def _margins(choice: Mapping[str, Any]) -> tuple[float, ...]:
    """A text completion's own list of the best tokens at each place; empty where it has none."""
    told = choice.get("logprobs")
    best = told.get("top_logprobs") if isinstance(told, dict) else None
    if not isinstance(best, list) or not all(isinstance(one, dict) and len(one) > 1 for one in best):
        return ()
    ordered = (sorted(map(float, one.values()), reverse=True) for one in best)
    return tuple(first - second for first, second, *_ in ordered)


def _message_text(message: Any) -> str:
    if not isinstance(message, dict):
        return ""
    # A reasoning parser moves the text of a thinking model to another field, whose name changed between releases.
    return "".join(str(message.get(key) or "") for key in ("reasoning_content", "reasoning", "content"))


def _usage(body: Mapping[str, Any]) -> Usage | None:
    usage = body.get("usage")
    if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    known = isinstance(cached, int) and cached >= 0  # a request that never ran may have -1
    return Usage(usage["prompt_tokens"], usage.get("completion_tokens") or 0, cached if known else None)


def _error_text(body: Any) -> str | None:
    if not isinstance(body, dict):
        return None
    error = body.get("error", body)
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or error)
    return str(error)


class Client:
    """One server's HTTP side. Close it, or use it as an async context manager.

    Each request has a connection pool of its own choosing by httpx; reading never times out here, since a slow prefill is no error:
    the watcher decides what is a hang, and cancels.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=httpx.Timeout(10.0, read=None),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,  # a proxy of the environment has no business between us and a loopback server
        )
        self.received = 0
        """Lines of streams that came so far: they move with the engine where its counters are turned off."""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str, *, timeout: float = 5.0) -> httpx.Response:
        """A plain GET; raises `httpx.HTTPError` where none answers within `timeout` seconds."""
        return await self._http.get(path, timeout=timeout)

    async def post(self, path: str, body: Mapping[str, Any], *, timeout: float = 60.0) -> httpx.Response:
        """A plain POST of JSON; raises `httpx.HTTPError`."""
        return await self._http.post(path, json=dict(body), timeout=timeout)

    async def ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Sends one completion request and returns what it saw; a `stream` in the body is followed to its end."""
        sent = time.time()
        streamed = bool(body.get("stream"))
        seen = _Stream()
        status: int | None = None
        try:
            async with self._http.stream("POST", path, json=dict(body)) as response:
                status = response.status_code
                if not streamed or status != 200:
                    return _plain_answer(sent, status, await response.aread(), streamed)
                async for line in response.aiter_lines():
                    self.received += 1
                    if line.startswith("data:"):
                        seen.feed(line[5:].strip())
            kind = "event" if seen.error else None
            error = seen.error
        except (httpx.HTTPError, httpx.StreamError) as failure:
            kind = "event" if seen.error else "transport"
            error = seen.error or f"{type(failure).__name__}: {failure}".rstrip(": ")
        return Answer(
            sent,
            time.time(),
            seen.refused or status,
            error,
            "body" if seen.refused else kind,
            seen.finish,
            seen.done,
            seen.usage,
            "".join(seen.text),
            tuple(seen.times),
            streamed,
            tuple(seen.arrivals),
            tuple(seen.tokens),
            tuple(seen.margins),
        )

    async def model_name(self) -> str:
        """The first served model; raises `httpx.HTTPError`, `ValueError` or `LookupError` where the answer is not vLLM's."""
        response = await self.get("/v1/models", timeout=30.0)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])


def _plain_answer(sent: float, status: int, raw: bytes, streamed: bool) -> Answer:
    now = time.time()
    body = _json(raw)
    if status != 200 or not isinstance(body, dict):
        text = _error_text(body) or raw.decode("utf-8", "replace")[:2000] or f"HTTP {status} with an empty body"
        return Answer(sent, now, status, text, "body", streamed=streamed)
    if "error" in body and "choices" not in body:
        return Answer(sent, now, status, _error_text(body), "body", streamed=streamed)
    choice = next(iter(_choices(body)), {})
    text = str(choice.get("text") or _message_text(choice.get("message")))
    return Answer(
        sent,
        now,
        status,
        None,
        None,
        choice.get("finish_reason"),
        True,
        _usage(body),
        text,
        (now,) if text else (),
        streamed,
        (now,),
        tuple(_tokens(choice, text)),
        _margins(choice),
    )
