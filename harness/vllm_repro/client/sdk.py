"""Client that behaves like a user's program: the `openai` SDK with its default retries."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

__all__ = ["SdkView", "sdk_view"]

_LONGEST_MESSAGE = 2_000


@dataclass(frozen=True, kw_only=True)
class SdkView:
    """Result of one SDK call as the program sees it.

    error: class name of the exception, None for a success. message: its text. seconds: duration of the call with its retries.
    text: generated text, None after an error.
    """

    error: str | None
    message: str
    retries: int
    seconds: float
    text: str | None


async def sdk_view(base_url: str, model: str, timeout_s: float, *, api_key: str | None = None) -> SdkView:
    """Send one small text completion through the SDK and return the outcome; never raises an SDK error.

    `timeout_s` limits each attempt. The SDK makes up to three attempts with about a second between them.
    """
    import httpx  # here and below: importing the SDK takes about a second, and few commands need it
    import openai

    from vllm_repro.client.client import bounded

    attempts = 0

    async def count(_: httpx.Request) -> None:
        nonlocal attempts
        attempts += 1

    async def limit(response: httpx.Response) -> None:
        response.aiter_bytes = partial(bounded, response.aiter_bytes())  # type: ignore[method-assign]  # what the SDK reads

    error, message, text = None, "", None
    started = time.monotonic()
    transport = openai.DefaultAsyncHttpxClient(
        trust_env=False,  # no proxy of the environment between this machine and its own server
        event_hooks={"request": [count], "response": [limit]},
    )
    async with openai.AsyncOpenAI(
        base_url=f"{base_url.rstrip('/')}/v1", api_key=api_key or "EMPTY", timeout=timeout_s, http_client=transport
    ) as client:
        try:
            completion = await client.completions.create(model=model, prompt="Hello", max_tokens=1)
            text = completion.choices[0].text
        except (openai.OpenAIError, ValueError, LookupError, TypeError, AttributeError) as failure:
            # The SDK does not validate the body of a 200, so reading a malformed one can raise anything but its own errors.
            error, message = type(failure).__name__, str(failure)[:_LONGEST_MESSAGE]
    return SdkView(
        error=error, message=message, retries=max(0, attempts - 1), seconds=time.monotonic() - started, text=text
    )
