"""Route for one request whose prompt arrives in segments.

Those of `/v1/realtime` do so, but that route serves only audio models.

vLLM loads it by name, like a user's own middleware: `--middleware vllm_repro_lab.segments.route`.
Then `POST /segments` takes

    {"segments": [[7, 8, 9], [10, 11], 0.5], "max_tokens": 64, "stop_token_ids": [77]}

segments: token ids, and pauses in seconds between them. The other fields are vLLM's sampling
parameters. The answer, `{"token_ids": [...]}`, is sent when the session has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from uuid import uuid4

from vllm.engine.protocol import StreamingInput
from vllm.sampling_params import RequestOutputKind, SamplingParams


async def route(request: Any, call_next: Callable[[Any], Awaitable[Any]]) -> Any:
    """Answer `POST /segments`; pass any other request on."""
    if request.url.path != "/segments":
        return await call_next(request)
    from fastapi.responses import JSONResponse  # type: ignore[import-not-found]  # only beside vLLM

    body = await request.json()
    body.pop("model", None)
    segments = body.pop("segments")

    async def inputs() -> AsyncIterator[Any]:
        for segment in segments:
            if isinstance(segment, list):
                yield StreamingInput(prompt={"prompt_token_ids": segment})
            else:
                await asyncio.sleep(segment)

    params = SamplingParams.from_optional(**body, output_kind=RequestOutputKind.DELTA)
    tokens: list[int] = []
    async for output in request.app.state.engine_client.generate(inputs(), params, uuid4().hex):
        tokens += output.outputs[0].token_ids
    return JSONResponse({"token_ids": tokens})
