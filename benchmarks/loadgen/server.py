"""OpenAI-compatible server that sends each token at a known time: `server TTFT ITL FILE`.

The first token of an answer names its request ("r17 "), so that any client's report can be matched
with the record, which SIGTERM writes. Times are those of `time.perf_counter`, one clock for all
processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
_MODELS = (
    b'{"object": "list", "data": [{"id": "loadgen", "object": "model", "max_model_len": 131072}]}'
)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _event(**fields: object) -> bytes:
    whole = {"id": "cmpl-loadgen", "object": "text_completion", "model": "loadgen", **fields}
    return _chunk(b"data: " + json.dumps(whole).encode() + b"\n\n")


class Server:
    """All requests.

    ttft, itl: seconds from a request to its first token, and to each further one.
    """

    def __init__(self, ttft: float, itl: float) -> None:
        self.ttft, self.itl = ttft, itl
        self.record: list[dict[str, Any]] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a kept-alive connection."""
        # the client is gone
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                _, _, length = head.partition(b"content-length:")
                body = await reader.readexactly(int(length.split(b"\r\n")[0] or 0))
                got = time.perf_counter()
                # take the time of the other requests that are here, before any work
                await asyncio.sleep(0)
                if head.startswith(b"post /v1/completions"):
                    await self._complete(json.loads(body), writer, got)
                else:
                    kind = b"content-type: application/json"
                    writer.write(
                        b"HTTP/1.1 200 OK\r\n%s\r\ncontent-length: %d\r\n\r\n%s"
                        % (kind, len(_MODELS), _MODELS)
                    )
        writer.close()

    async def _complete(
        self, body: dict[str, Any], writer: asyncio.StreamWriter, got: float
    ) -> None:
        times: list[float] = []
        tokens = int(body["max_tokens"])
        text = f"r{len(self.record)} "
        self.record.append({"got": got, "times": times})
        writer.write(_STREAM)
        for place in range(tokens):
            await asyncio.sleep(got + self.ttft + place * self.itl - time.perf_counter())
            finish = "length" if place + 1 == tokens else None
            token = _event(choices=[{"index": 0, "text": text, "finish_reason": finish}])
            times.append(time.perf_counter())
            writer.write(token)
            text = "x "
        words = body["prompt"] if isinstance(body["prompt"], list) else body["prompt"].split()
        usage = {"prompt_tokens": len(words), "completion_tokens": tokens}
        writer.write(_event(choices=[], usage=usage) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def serve(server: Server, record: Path) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    listening = await asyncio.start_server(server.connected, "127.0.0.1", 0, backlog=1024)
    print("listening", listening.sockets[0].getsockname()[1], flush=True)
    await over.wait()
    record.write_text(json.dumps(server.record))


if __name__ == "__main__":
    ttft, itl, record = sys.argv[1:]
    # On asyncio's own loop: uvloop defers a write, so its time would not be known.
    asyncio.run(serve(Server(float(ttft), float(itl)), Path(record)))
