"""Client that behaves like a user's program: the `openai` SDK with its default retries.

It retries on the dying server, so its user sees another error than the cause of the crash. The
report shows both. The outcome of a trial does not depend on it. Attached servers get no request
from it.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from vllm_repro.client.answer import Answer

_LONGEST_MESSAGE = 2_000


class FailedRequest(NamedTuple):
    """A request that was in flight when the engine died."""

    endpoint: str
    body: Mapping[str, Any]
    # what came back, with `error` set
    answer: Answer


@dataclass(frozen=True, kw_only=True)
class SdkView:
    """Result of an `openai` SDK call, as a program sees it: text or exception, retries, seconds."""

    # class name of the exception; None for a success
    error: str | None
    # text of the exception
    message: str
    retries: int
    # from the first failure to the exception, with the retries
    seconds: float
    # generated text; empty for a stream, None after an error
    text: str | None
    # HTTP status of each attempt of the failed request, the recorded failure first; None for an
    # attempt without an answer. Empty if no request failed: then this is another call, after the
    # crash.
    attempts: tuple[int | None, ...] = ()


async def sdk_view(
    base_url: str,
    model: str,
    timeout_s: float,
    *,
    failed: FailedRequest | None = None,
    api_key: str | None = None,
) -> SdkView:
    """Return what a program with the `openai` SDK sees of the request `failed`.

    An error of the SDK is returned, never raised.

    The SDK's first attempt gets the recorded failure. Its retries, with the same body and after the
    SDK's own delays, go to the server. Without a failed request the program asks `model` for one
    token. timeout_s: of each attempt.
    """
    import httpx  # here and below: importing the SDK takes about a second, and few commands need it
    import openai
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    from vllm_repro.client.client import bounded

    endpoint, body = "/v1/completions", {"model": model, "prompt": "Hello", "max_tokens": 1}
    if failed is not None:
        endpoint, body = failed.endpoint, dict(failed.body)
    attempts: list[int | None] = []

    async def limit(response: httpx.Response) -> None:
        read = partial(bounded, response.aiter_bytes())
        response.aiter_bytes = read  # type: ignore[method-assign]  # the SDK reads the body with it

    class Http(openai.DefaultAsyncHttpxClient):
        async def send(self, request: Any, **options: Any) -> Any:
            attempts.append(None)
            if failed is not None and len(attempts) == 1:
                response = await _recorded(failed.answer, request)
            else:
                response = await super().send(request, **options)
            attempts[-1] = response.status_code
            return response

    root = base_url.rstrip("/")
    kinds: Mapping[str, Any] = {
        "/v1/completions": Completion,
        "/v1/chat/completions": ChatCompletion,
    }
    kind, streamed = kinds.get(endpoint), body.get("stream") is True
    error, message, text = None, "", None
    started = time.monotonic()
    # No proxy between this machine and its server.
    transport = Http(trust_env=False, event_hooks={"response": [limit]})
    async with openai.AsyncOpenAI(
        base_url=f"{root}/v1", api_key=api_key or "EMPTY", timeout=timeout_s, http_client=transport
    ) as client:
        try:
            if streamed:
                stream_cls = openai.AsyncStream[object]
                path = f"{root}{endpoint}"
                async for _ in await client.post(
                    path, cast_to=object, body=body, stream=True, stream_cls=stream_cls
                ):
                    pass
                text = ""
            else:
                answer = await client.post(f"{root}{endpoint}", cast_to=kind or object, body=body)
                choice = answer.choices[0] if kind else None
                text = (
                    (choice.text if kind is Completion else choice.message.content)
                    if choice
                    else ""
                )
        # the SDK does not validate the body of a 200, so reading it may raise anything
        except Exception as failure:
            error, message = type(failure).__name__, str(failure)[:_LONGEST_MESSAGE]
    return SdkView(
        error=error,
        message=message,
        retries=max(0, len(attempts) - 1),
        seconds=time.monotonic() - started,
        text=text,
        attempts=tuple(attempts) if failed is not None else (),
    )


async def _recorded(answer: Answer, request: Any) -> Any:
    """Return the recorded answer as a response of the SDK's HTTP library, which made `request`.

    Raise the library's `ReadError` if the recorded failure was in the transport. SDK releases use
    different libraries.
    """
    library = importlib.import_module(type(request).__module__.partition(".")[0])
    body = {"error": {"message": answer.error, "code": answer.status}}
    if answer.status is None or (answer.error_kind == "transport" and not answer.streamed):
        raise library.ReadError(answer.error, request=request)

    async def stream() -> AsyncIterator[bytes]:
        if answer.error_kind == "transport":
            raise library.ReadError(answer.error, request=request)
        yield f"data: {json.dumps(body)}\n\n".encode()

    if answer.streamed and answer.status == 200:
        return library.Response(200, content=stream(), request=request)
    return library.Response(answer.status, json=body, request=request)
