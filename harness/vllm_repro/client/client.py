"""HTTP client that records every response as an `Answer`.

HTTP errors, resets and broken streams are results here: they raise nothing and are not retried.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from vllm_repro.client.answer import WHOLE, Answer, Usage

__all__ = ["Client", "bounded", "fields_of", "is_rehearsal", "release_of"]

_MOST_BYTES = 64 << 20
"""Longest response that is read: a broken server may never stop sending."""
_OTHER_EVENTS = 100
"""Events of a stream beyond one for each token: roles, usage, the end of a choice."""


@dataclass
class _Received:
    """Content of an answer up to now.

    choices: the endpoint returns choices, as all completions do. most: events that a stream may have.
    refused: the 4xx code of an error event.
    """

    choices: bool = True
    most: float = math.inf
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
    refused: int | None = None
    done: bool = False

    def take_event(self, data: str) -> None:
        """Take the data of one event of a stream. Raises `httpx.RemoteProtocolError` for one too many."""
        self.events += 1
        if self.events > self.most:
            raise httpx.RemoteProtocolError(f"the stream goes on after {self.most} events")
        event = _json(data)
        if data == "[DONE]":
            self.done = True
        elif not isinstance(event, dict):
            self.fail("event", f"stream event is not a JSON object: {data[:200]}")
        elif event.get("error") is not None:
            code = event["error"].get("code") if isinstance(event["error"], dict) else None
            self.refused = code if isinstance(code, int) and 400 <= code < 500 else None
            self.error = _error_text(event) or "error event without a message"
            self.error_kind = "body" if self.refused else "event"
        else:
            self._take(event, _choices(event))

    def take_body(self, status: int, raw: bytes) -> None:
        """Take the body of an answer that is no stream."""
        body = _json(raw)
        if status == 200 and not self.choices and not isinstance(body, dict):
            self.done = True  # a list, a text, numbers, or nothing: any content is an answer
        elif status != 200 or not isinstance(body, dict):
            text = _error_text(body) or raw.decode("utf-8", "replace")[:2000] or f"HTTP {status} with an empty body"
            self.fail("body", text)
        elif body.get("error") is not None and "choices" not in body:
            self.fail("body", _error_text(body) or "error without a message")
        else:
            self.done = True
            self._take(body, _choices(body)[:1])

    def fail(self, kind: str, text: str) -> None:
        """Record an error, unless an earlier one explains it."""
        if self.error is None:
            self.error, self.error_kind = text, kind

    def finish_whole(self) -> None:
        """Take the end of an answer. One without choices is then complete, unless it had an error or an empty stream."""
        if not self.choices and self.error is None and (self.done or self.events):
            self.done, self.finish = True, WHOLE

    def _take(self, body: Mapping[str, Any], choices: list[dict[str, Any]]) -> None:
        self.usage = _usage(body) or self.usage
        now = time.time()
        for choice in choices:
            piece = str(choice.get("text") or _message_text(choice.get("delta") or choice.get("message")))
            self.arrivals.append(now)
            self.tokens += _tokens(choice, piece)
            self.margins += _margins(choice)
            if piece:
                self.text.append(piece)
                self.times.append(now)
            self.finish = choice.get("finish_reason") or self.finish


def _json(data: str | bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _choices(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the well-formed choices. The server may be broken, or not vLLM."""
    choices = body.get("choices")
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def _tokens(choice: Mapping[str, Any], text: str) -> list[int | str]:
    ids = choice.get("token_ids")
    if isinstance(ids, list) and all(isinstance(one, int) for one in ids):
        return list(ids)
    return [text] if text else []


def _margins(choice: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the margins of the tokens of a text or chat completion; empty without `logprobs`."""
    logprobs = choice.get("logprobs")
    try:
        if isinstance(logprobs, dict) and isinstance(content := logprobs.get("content"), list):
            best = [[one["logprob"] for one in token["top_logprobs"]] for token in content]
        else:
            best = [list(one.values()) for one in logprobs["top_logprobs"]] if isinstance(logprobs, dict) else []
        ordered = [sorted(map(float, one), reverse=True) for one in best]
        return tuple(first - second for first, second, *_ in ordered)
    except (LookupError, TypeError, ValueError, AttributeError):
        return ()


def _message_text(message: Any) -> str:
    if not isinstance(message, dict):
        return ""
    # A reasoning parser moves text to another field, and releases name that field differently.
    return "".join(str(message.get(key) or "") for key in ("reasoning_content", "reasoning", "content"))


def _usage(body: Mapping[str, Any]) -> Usage | None:
    """Return the counts of an answer or event. Some endpoints say input for prompt, or nest the counts of a stream in `response`."""
    inner = body.get("response")
    usage = body.get("usage") or (inner.get("usage") if isinstance(inner, dict) else None)
    if not isinstance(usage, dict):
        return None
    prompt, completion = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
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
    if not isinstance(body, dict):
        return None
    error = body.get("error", body)
    if isinstance(error, dict):
        text = str(error.get("message") or error.get("detail") or error)
        named = error.get("param")
        return f"{text} (parameter={named})" if isinstance(named, str) and named not in text else text
    return str(error)


class Client:
    """HTTP client for one server; close it, or use it as an async context manager.

    Completion requests have no read timeout: a prefill can take minutes. The watcher detects hangs and cancels.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=httpx.Timeout(10.0, read=None),
            limits=httpx.Limits(max_connections=None),
            verify=base_url.startswith("https"),  # else reading the certificates takes 30 ms for nothing
            trust_env=False,  # no proxy of the environment between this machine and its own server
        )
        self.received = 0
        """Events received from all streams: shows progress when a server has no metrics."""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str, *, timeout: float = 5.0) -> httpx.Response:
        """Return the response to a GET. Raises `httpx.HTTPError`, also for one of over 64 MiB or `timeout` seconds."""
        return await self._fetch("GET", path, None, timeout)

    async def post(self, path: str, body: Mapping[str, Any], *, timeout: float = 60.0) -> httpx.Response:
        """Return the response to a POST of JSON. Raises like `get`."""
        return await self._fetch("POST", path, dict(body), timeout)

    async def _fetch(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> httpx.Response:
        try:
            async with (
                asyncio.timeout(timeout),  # httpx limits each read, not their sum
                self._http.stream(method, path, json=body, timeout=timeout) as response,
            ):
                raw = await _read(response)
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no complete response within {timeout:g} s") from error
        decoded = [(name, value) for name, value in response.headers.items() if name != "content-encoding"]
        return httpx.Response(response.status_code, headers=decoded, content=raw, request=response.request)

    async def ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Send one request and return its answer; follow a stream to its end."""
        sent, streamed = time.time(), bool(body.get("stream"))
        received = _Received(choices=path.endswith("/completions"), most=_most_events(body))
        status: int | None = None
        try:
            async with self._http.stream("POST", path, json=dict(body)) as response:
                status = response.status_code
                if status != 200 or not streamed or "json" in response.headers.get("content-type", ""):
                    received.take_body(status, await _read(response))
                else:
                    async for line in _lines(response):
                        if line.startswith("data:"):
                            self.received += 1
                            received.take_event(line[5:].strip())
                received.finish_whole()
        except (httpx.HTTPError, httpx.StreamError) as failure:
            received.fail("transport", f"{type(failure).__name__}: {failure}".rstrip(": "))
        return Answer(
            sent=sent,
            ended=time.time(),
            status=received.refused or status,
            error=received.error,
            error_kind=received.error_kind,
            finish_reason=received.finish,
            done=received.done,
            usage=received.usage,
            text="".join(received.text),
            token_times=tuple(received.times),
            streamed=streamed,
            arrivals=tuple(received.arrivals),
            tokens=tuple(received.tokens),
            margins=tuple(received.margins),
        )

    async def model_name(self) -> str:
        """Return the name of the first served model. Raises `httpx.HTTPError`, `ValueError`, `LookupError` or `TypeError`."""
        response = await self.get("/v1/models", timeout=30.0)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])

    async def known_fields(self) -> dict[str, frozenset[str]]:
        """Return the body fields that each endpoint of this release reads, by its OpenAPI schema; empty if it shows none.

        vLLM takes any other field too, and ignores it.
        """
        try:
            return fields_of((await self.get("/openapi.json", timeout=30.0)).json())
        except (httpx.HTTPError, ValueError):
            return {}


def fields_of(schema: Any) -> dict[str, frozenset[str]]:
    """Return the body fields of each endpoint in an OpenAPI schema, or nothing for another text."""
    found: dict[str, frozenset[str]] = {}
    try:
        for path, methods in schema["paths"].items():
            content = methods.get("post", {}).get("requestBody", {}).get("content", {})
            if "application/json" in content:
                model = content["application/json"]["schema"]
                found[path] = frozenset(_properties(model, schema["components"]["schemas"]))
    except (LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return found


def is_rehearsal(response: httpx.Response) -> bool:
    """Return True if the rehearsal engine answered, which marks each of its responses."""
    return "x-vllm-rehearsal" in response.headers


def release_of(response: httpx.Response) -> str:
    """Return the release in a response of `/version`. Raises `ValueError`, `LookupError` or `TypeError` if it holds none.

    Anything may listen at a URL. Only letters, digits and `.+!-` get into reports, so no markup and no terminal escape does.
    """
    version = response.json()["version"]
    if not re.fullmatch(r"[\w.+!-]{1,80}", version, re.ASCII):
        raise ValueError(f"{version[:80]!r} is not a release")
    return str(version)


def _most_events(body: Mapping[str, Any]) -> float:
    """Return how many events a stream of `max_tokens` may have. A scenario may state any value."""
    tokens, choices = body.get("max_tokens"), body.get("n", 1)
    if not isinstance(tokens, int) or not isinstance(choices, int):
        return math.inf
    return max(1, tokens) * max(1, choices) + _OTHER_EVENTS


def _properties(node: Mapping[str, Any], models: Mapping[str, Any]) -> set[str]:
    """Return the names of the properties of a schema, its references and its alternatives."""
    node = models[node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    parts = (part for key in ("anyOf", "allOf", "oneOf") for part in node.get(key, ()))
    return set(node.get("properties", ())).union(*(_properties(part, models) for part in parts))


async def bounded(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the pieces of a body. Raises `httpx.RemoteProtocolError` after 64 MiB."""
    size = 0
    async for piece in body:
        size += len(piece)
        if size > _MOST_BYTES:
            raise httpx.RemoteProtocolError(f"response is larger than {_MOST_BYTES >> 20} MiB")
        yield piece


async def _read(response: httpx.Response) -> bytes:
    return b"".join([piece async for piece in bounded(response.aiter_bytes())])


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    pending = bytearray()
    async for piece in bounded(response.aiter_bytes()):
        pending += piece
        if b"\n" in piece:
            *whole, pending = pending.split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace")
    yield pending.decode("utf-8", "replace")
