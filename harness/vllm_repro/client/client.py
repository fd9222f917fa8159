"""HTTP client that records every response as an `Answer`.

HTTP errors, resets and broken streams are results here: they raise nothing and are not retried.
Each request opens a new connection. A server may close a reused one just as a request begins, which
looks like a death.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
from httpx import HTTPError, HTTPStatusError, TimeoutException

from vllm_repro.client.answer import Answer
from vllm_repro.client.received import MOST_BYTES, EndlessAnswerError, Received

__all__ = [
    "Client",
    "HTTPError",
    "HTTPStatusError",
    "TimeoutException",
    "bounded",
    "fields_of",
    "is_rehearsal",
    "release_of",
]


class _Transport(httpx.AsyncHTTPTransport):
    """Transport that reports a connection that was closed at once as a failed connection."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; raise `ConnectError` if the connection closes at once."""
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:  # anyio asks a closed socket for its peer
            raise httpx.ConnectError("closed as it was opened", request=request) from error


class Client:
    """HTTP client for one server: `async with Client(url) as client`.

    Completion requests have no read timeout: a prefill can take minutes. The watcher detects hangs
    and cancels.
    """

    def __init__(self, base_url: str, *, api_key: str | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=httpx.Timeout(10.0, read=None),
            transport=_Transport(
                # One connection per request: the server may close a reused one as a request begins.
                # If the task is cancelled, httpx loses all but one of the connections it closes.
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                # else reading the certificates takes 30 ms for nothing
                verify=base_url.startswith("https"),
                trust_env=False,
            ),
            trust_env=False,  # no proxy between this machine and its server
        )
        self.received = 0
        """Events received from all streams: shows progress when a server has no metrics."""

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def get(self, path: str, *, timeout: float = 5.0) -> httpx.Response:
        """Return the response to a GET, also one with an error status.

        Raises `HTTPError` without a response, and after 64 MiB or `timeout` seconds.
        """
        return await self._fetch("GET", path, None, timeout)

    async def post(
        self, path: str, body: Mapping[str, Any], *, timeout: float = 60.0
    ) -> httpx.Response:
        """Return the response to a POST of JSON. Raises like `get`. timeout: in seconds."""
        return await self._fetch("POST", path, dict(body), timeout)

    async def _fetch(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> httpx.Response:
        """Return the whole response to a GET or POST, like `get`. timeout: in seconds."""
        try:
            async with (
                asyncio.timeout(timeout),  # httpx limits each read, not their sum
                self._http.stream(method, path, json=body, timeout=timeout) as response,
            ):
                raw = await _read(response)
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no complete response within {timeout:g} s") from error
        decoded = [
            (name, value) for name, value in response.headers.items() if name != "content-encoding"
        ]
        return httpx.Response(
            response.status_code, headers=decoded, content=raw, request=response.request
        )

    async def ask(self, path: str, body: Mapping[str, Any]) -> Answer:
        """Send one request and return its answer; follow a stream to its end.

        Wait without limit. Failures are in the answer, not raised. Add the stream's events to
        `self.received`.
        """
        sent, received = time.time(), Received.of(path, body)
        try:
            async with self._http.stream("POST", path, json=dict(body)) as response:
                received.begin(response.status_code, response.headers.get("content-type", ""))
                async for piece in response.aiter_bytes():
                    before = received.events
                    received.feed(piece, time.time())
                    self.received += received.events - before
                received.end(time.time())
        except (HTTPError, httpx.StreamError, EndlessAnswerError) as failure:
            received.fail("transport", f"{type(failure).__name__}: {failure}".rstrip(": "))
        return received.answer(sent, time.time())

    async def model_name(self) -> str:
        """Return the name of the first served model.

        Raises `HTTPError`; for a reply without a model `ValueError`, `LookupError` or `TypeError`.
        """
        response = await self.get("/v1/models", timeout=30.0)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])

    async def known_fields(self) -> dict[str, frozenset[str]]:
        """Return the body fields that each endpoint of this release reads.

        They come from its OpenAPI schema; empty if the server shows none. vLLM accepts any other
        field too, and ignores it.
        """
        try:
            return fields_of((await self.get("/openapi.json", timeout=30.0)).json())
        except (HTTPError, ValueError):
            return {}


def fields_of(schema: Any) -> dict[str, frozenset[str]]:
    """Return each endpoint's body fields in an OpenAPI schema; empty if the JSON is no schema."""
    fields: dict[str, frozenset[str]] = {}
    try:
        for path, methods in schema["paths"].items():
            content = methods.get("post", {}).get("requestBody", {}).get("content", {})
            if "application/json" in content:
                model = content["application/json"]["schema"]
                fields[path] = frozenset(_properties(model, schema["components"]["schemas"]))
    except (LookupError, TypeError, AttributeError, RecursionError):
        return {}
    return fields


def is_rehearsal(response: httpx.Response) -> bool:
    """Return True if the rehearsal engine answered, which marks each of its responses."""
    return "x-vllm-rehearsal" in response.headers


def release_of(response: httpx.Response) -> str:
    """Return the vLLM release, such as `0.32.0`, that a response of `/version` names.

    Raises `ValueError`, `LookupError` or `TypeError` if it holds none.

    Any program may listen at a URL. Only letters, digits and `.+!-` are accepted, so that no markup
    or terminal escape gets into reports.
    """
    version = response.json()["version"]
    if not re.fullmatch(r"[\w.+!-]{1,80}", version, re.ASCII):
        raise ValueError(f"{version[:80]!r} is not a release")
    return str(version)


def _properties(node: Mapping[str, Any], models: Mapping[str, Any]) -> set[str]:
    """Return the field names of a JSON schema, its references and alternatives included.

    models: the schemas that it may refer to, by name.
    """
    node = models[node["$ref"].rpartition("/")[2]] if "$ref" in node else node
    parts = (part for key in ("anyOf", "allOf", "oneOf") for part in node.get(key, ()))
    return set(node.get("properties", ())).union(*(_properties(part, models) for part in parts))


async def bounded(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield a response body in pieces. Raises `httpx.RemoteProtocolError` after 64 MiB."""
    size = 0
    async for piece in body:
        size += len(piece)
        if size > MOST_BYTES:
            raise httpx.RemoteProtocolError(f"response is larger than {MOST_BYTES >> 20} MiB")
        yield piece


async def _read(response: httpx.Response) -> bytes:
    """Return the whole body of a response. Raises `HTTPError` after 64 MiB."""
    return b"".join([piece async for piece in bounded(response.aiter_bytes())])
