"""Closed loop of one client as a process: `driver CLIENT URL STREAMS REQUESTS TOKENS FILE`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import uvloop

from vllm_repro.client.load import LoadClient

Done = dict[str, Any]
"""What is known of one request: text, sent, times."""
Ask = Callable[[dict[str, Any]], Awaitable[Done]]


def ours(url: str) -> Ask:
    """Return the measuring client."""
    client = LoadClient(url)
    epoch = client.now() - time.perf_counter()

    async def ask(body: dict[str, Any]) -> Done:
        await client.open(1)
        answer = await client.ask("/v1/completions", body)
        times = [at - epoch for at in answer.arrivals]
        return {"text": answer.text, "sent": answer.sent - epoch, "times": times}

    return ask


def bare(url: str) -> Ask:
    """Return asyncio streams, read line by line and parsed with json: what plain Python reaches."""
    host, port = url.removeprefix("http://").split(":")

    async def ask(body: dict[str, Any]) -> Done:
        reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
        raw = json.dumps(body).encode()
        done: Done = {"text": "", "sent": time.perf_counter(), "times": []}
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s"
            % (len(raw), raw)
        )
        while (line := await reader.readline()) != b"data: [DONE]\n":
            now = time.perf_counter()
            choices = json.loads(line[6:])["choices"] if line.startswith(b"data: ") else []
            if choices:
                done["text"] += choices[0]["text"]
                done["times"].append(now)
        writer.close()
        return done

    return ask


CLIENTS = {"ours": ours, "bare": bare}


async def drive(ask: Ask, streams: int, requests: int, tokens: int) -> list[Done]:
    """Send all requests, `streams` at a time."""
    body = {
        "model": "loadgen",
        "prompt": " ".join(["word"] * 32),
        "max_tokens": tokens,
        "stream": True,
    }
    body["stream_options"] = {"include_usage": True}
    left = iter(range(requests))

    async def worker() -> list[Done]:
        return [await ask(body) for _ in left]

    kept = await asyncio.gather(*(worker() for _ in range(streams)))
    return [done for part in kept for done in part]


if __name__ == "__main__":
    client, url, *shape, out = sys.argv[1:]
    # Both on the harness's loop, so that it makes no difference.
    done = uvloop.run(drive(CLIENTS[client](url), *map(int, shape)))
    Path(out).write_text(json.dumps(done))
