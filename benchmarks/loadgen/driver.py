"""Closed loop over one client library, as a process of its own: `driver.py NAME --url URL -c 128 -n 384 --tokens 100 --out FILE`."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop

PROMPT = " ".join(["word"] * 32)
Done = dict[str, Any]
"""What is known of one request: text, sent, times, error."""
Ask = Callable[[dict[str, Any]], Awaitable[Done]]


@asynccontextmanager
async def ours(url: str, streams: int) -> AsyncIterator[list[Ask]]:
    """Open the measuring client."""
    from vllm_repro.client.load import LoadClient

    epoch = time.time() - time.perf_counter()

    async with LoadClient(url, connections=streams, stall=10.0) as client:

        async def ask(body: dict[str, Any]) -> Done:
            answer = await client.ask("/v1/completions", body)
            error = "" if answer.ok else answer.error or "not whole"
            times = [at - epoch for at in answer.arrivals]
            return {"text": answer.text, "sent": answer.sent - epoch, "times": times, "error": error}

        yield [ask] * streams


@asynccontextmanager
async def bare(url: str, streams: int) -> AsyncIterator[list[Ask]]:
    """Open asyncio streams, read line by line, parse with json."""
    host, port = url.removeprefix("http://").split(":")

    async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(host, int(port), limit=1 << 20)

    def worker(pair: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> Ask:
        async def ask(body: dict[str, Any]) -> Done:
            nonlocal pair
            if pair[0].at_eof():
                pair = await connect()
            reader, writer = pair
            raw = json.dumps(body).encode()
            taken = _Taken(time.perf_counter())
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(raw), raw))
            pending = b""
            while not pending.endswith(b"0\r\n\r\n"):
                data = await reader.read(262144)
                now = time.perf_counter()
                if not data:
                    return taken.done("closed")
                pending += data
                if pending.startswith(b"HTTP/1.1 503") and b"}}" in pending:
                    return taken.done("503")
                *lines, pending = pending.split(b"\n\n")
                for line in lines:
                    at = line.rfind(b"data: ")
                    if at >= 0 and line[at + 6 :] != b"[DONE]":
                        taken.event(json.loads(line[at + 6 :]), now)
            return taken.done()

        return ask

    yield [worker(await connect()) for _ in range(streams)]


@asynccontextmanager
async def httpx(url: str, streams: int) -> AsyncIterator[list[Ask]]:
    """Open one httpx.AsyncClient a worker."""
    from httpx import AsyncClient

    clients = [AsyncClient(base_url=url, timeout=None, trust_env=False, verify=False) for _ in range(streams)]

    def worker(client: AsyncClient) -> Ask:
        async def ask(body: dict[str, Any]) -> Done:
            taken = _Taken(time.perf_counter())
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        taken.event(json.loads(line[6:]), time.perf_counter())
            return taken.done()

        return ask

    yield [worker(client) for client in clients]


@asynccontextmanager
async def openai(url: str, streams: int) -> AsyncIterator[list[Ask]]:
    """Open one openai.AsyncOpenAI a worker."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    def client() -> AsyncOpenAI:
        http = DefaultAsyncHttpxClient(trust_env=False, verify=False, timeout=None)
        return AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, http_client=http)

    def worker(sdk: AsyncOpenAI) -> Ask:
        async def ask(body: dict[str, Any]) -> Done:
            fields = {name: body[name] for name in ("model", "prompt", "max_tokens", "stream_options")}
            taken = _Taken(time.perf_counter())
            async for piece in await sdk.completions.create(**fields, stream=True):
                if piece.choices:
                    taken.times.append(time.perf_counter())
                    taken.text = taken.text or piece.choices[0].text
            return taken.done()

        return ask

    yield [worker(client()) for _ in range(streams)]


CLIENTS = {"ours": ours, "bare": bare, "httpx": httpx, "openai": openai}


class _Taken:
    """What one request received up to now."""

    def __init__(self, sent: float) -> None:
        self.sent, self.text = sent, ""
        self.times: list[float] = []

    def event(self, event: dict[str, Any], now: float) -> None:
        if event.get("choices"):
            self.times.append(now)
            self.text = self.text or event["choices"][0]["text"]

    def done(self, error: str = "") -> Done:
        return {"text": self.text, "sent": self.sent, "times": self.times, "error": error}


async def drive(given: argparse.Namespace) -> list[Done]:
    """Send all requests, `given.c` at a time."""
    body = {"model": "loadgen", "prompt": PROMPT, "max_tokens": given.tokens, "stream": True}
    body["stream_options"] = {"include_usage": True}
    kept: list[Done] = []
    left = iter(range(given.n))
    received, million = 0, 1

    async def worker(ask: Ask) -> None:
        nonlocal received, million
        for _ in left:
            try:
                done = await ask(body)
            except Exception as error:  # any failure of a library is a failed request
                done = {"text": "", "sent": 0.0, "times": [], "error": f"{type(error).__name__}: {error}"}
            received += len(done["times"])
            if given.light and not done["error"]:
                if received >= million * 1_000_000:
                    print(f"{million} M tokens: RSS {_rss():.1f} MiB", flush=True)
                    million += 1
            else:
                kept.append(done)

    async with CLIENTS[given.client](given.url, given.c) as asks:
        await asyncio.gather(*(worker(ask) for ask in asks))
    return kept


def _rss() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("--url", required=True)
    parser.add_argument("-c", type=int, default=1, help="requests at a time")
    parser.add_argument("-n", type=int, default=1, help="requests")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument(
        "--light", action="store_true", help="keep nothing of a good request; print the memory at each million tokens"
    )
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    # Ours as the harness runs it, and the bare one too, so that the loop makes no difference.
    run = uvloop.run if given.client in ("ours", "bare") else asyncio.run
    done = run(drive(given))
    Path(given.out).write_text(json.dumps(done))
    sys.exit(any(one["error"] for one in done))


if __name__ == "__main__":
    main()
