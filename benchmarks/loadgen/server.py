"""OpenAI-compatible server that sends each token at a known time, records when it did, and breaks on demand.

The first token of an answer names its request ("r17 "), so that any client's report can be matched with the record. Times are those of
`time.perf_counter`, one clock for all processes.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import signal
import time
from array import array
from pathlib import Path
from typing import Any, cast

import uvloop

FAULTS = ("killed", "cut", "error", "fin", "503", "stall")
CUT_AT = 50
"""Tokens of an answer before its fault."""
KILL_AT = 1000
"""Tokens of all answers before the server is killed."""
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_NEAR = 0.002


def _event(text: str, finish: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    whole = {"id": "cmpl-loadgen", "object": "text_completion", "created": 1, "model": "loadgen", "choices": [choice]}
    return b"data: " + json.dumps(whole).encode() + b"\n\n"


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


_TOKEN = _event("x ")
_PACED = _chunk(_TOKEN)


class Stream:
    """One answer in the making."""

    def __init__(
        self, server: Server, transport: asyncio.Transport, body: dict[str, Any], prompt: int, got: float
    ) -> None:
        self.server, self.transport = server, transport
        self.number = len(server.streams)
        self.got = got
        self.asked = int(body.get("max_tokens") or 16)
        self.usage = {"prompt_tokens": prompt, "completion_tokens": self.asked, "total_tokens": prompt + self.asked}
        self.sent, self.headed = 0, False
        self.times = array("d")
        every_fourth = server.fault in ("cut", "error", "fin", "503") and self.number % 4 == 3
        self.fault = server.fault if every_fourth or (server.fault == "stall" and self.number == 5) else ""

    @property
    def due(self) -> float:
        if not self.headed:  # later than the request, so that the next request is not kept waiting
            return self.got + self.server.ttft / 5
        return self.got + self.server.ttft + self.sent * self.server.itl

    def token(self) -> bool:
        """Send the head or the next token. Return False if it was the last."""
        if self.transport.is_closing():
            return False
        if not self.headed:
            self.headed = True
            self.transport.write(_HEAD)
            return True
        if self.fault and self.sent == CUT_AT:
            return self._break()
        self.times.append(time.perf_counter())
        if self.sent + 1 == self.asked:
            self.transport.write(_chunk(self._event()) + self._end())
        else:
            self.transport.write(_PACED if self.sent else _chunk(self._event()))
        self.sent += 1
        self.server.count(1)
        return self.sent < self.asked

    def burst(self) -> bool:
        """Send as many events as one write takes. Return False if they were the last."""
        if self.transport.is_closing():
            return False
        many = min(self.server.burst, self.asked - self.sent)
        first, last = not self.sent, self.sent + many == self.asked
        self.sent += many
        if first or last:
            middle = _TOKEN * (many - (2 if first and last and many > 1 else 1))
            head = _event(f"r{self.number} ", "length" if last and many == 1 else None) if first else b""
            tail = _event("x ", "length") if last and not (first and many == 1) else b""
            data = (_HEAD if first else b"") + _chunk(head + middle + tail) + (self._end() if last else b"")
        else:
            data = self.server.burst_bytes
        self.transport.write(data)
        self.server.count(many)
        return not last

    def _event(self) -> bytes:
        return _event("x " if self.sent else f"r{self.number} ", "length" if self.sent + 1 == self.asked else None)

    def _end(self) -> bytes:
        usage = {"id": "cmpl-loadgen", "object": "text_completion", "model": "loadgen", "choices": []}
        event = b"data: " + json.dumps({**usage, "usage": self.usage}).encode() + b"\n\n"
        return _chunk(event) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def _break(self) -> bool:
        if self.fault == "cut":
            self.transport.write(b"0\r\n\r\n")
        elif self.fault == "error":
            error = {"error": {"message": "the engine is in trouble", "type": "InternalServerError", "code": 500}}
            event = b"data: " + json.dumps(error).encode() + b"\n\n"
            self.transport.write(_chunk(event) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        elif self.fault == "fin":
            self.transport.close()
        return False


class Server:
    """All requests, and the clock that sends their tokens."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.ttft: float = given.ttft / 1000
        self.itl: float = given.itl / 1000
        self.burst: int = given.burst
        self.fault, self.record = given.fault, Path(given.record)
        self.burst_bytes = _chunk(_TOKEN * self.burst) if self.burst else b""
        self.streams: list[Stream] = []
        self.tokens = self.prompts = 0
        self.died: float | None = None
        self._due: list[tuple[float, int, Stream]] = []
        self._armed = False

    def add(self, stream: Stream) -> None:
        """Answer a request."""
        heapq.heappush(self._due, (stream.due, stream.number, stream))
        if not self._armed:
            self._arm()

    def count(self, tokens: int) -> None:
        self.tokens += tokens
        if self.fault == "killed" and self.tokens >= KILL_AT:
            self.died = time.perf_counter()
            self.save()
            os.kill(os.getpid(), signal.SIGKILL)

    def save(self) -> None:
        """Write the record."""
        requests = [
            {"got": one.got, "asked": one.asked, "sent": one.sent, "fault": one.fault, "times": list(one.times)}
            for one in self.streams
        ]
        self.record.write_text(json.dumps({"requests": requests, "died": self.died}))

    def _run(self) -> None:
        while self._due and self._due[0][0] <= time.perf_counter():
            _, number, stream = heapq.heappop(self._due)
            if stream.token():
                heapq.heappush(self._due, (stream.due, number, stream))
        self._arm()

    def _arm(self) -> None:
        # Timers of event loops are coarser than a millisecond: spin when the next token is near.
        self._armed = bool(self._due)
        if self._armed:
            wait = self._due[0][0] - time.perf_counter()
            loop = asyncio.get_running_loop()
            if wait > _NEAR:
                loop.call_later(wait - _NEAR / 2, self._run)
            else:
                loop.call_soon(self._run)


class Connection(asyncio.Protocol):
    """One kept-alive connection of HTTP/1.1."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.pending = b""
        self.paused: Stream | None = None
        self.full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.pending += data
        if self.server.burst:
            self._read(0.0)
        else:  # take the time of all requests that are here, before the work for the first of them
            asyncio.get_running_loop().call_soon(self._read, time.perf_counter())

    def _read(self, got: float) -> None:
        while (end := self.pending.find(b"\r\n\r\n")) >= 0:
            head = self.pending[:end]
            lower = head.lower()
            at = lower.find(b"content-length:")
            length = int(lower[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.pending) < end + 4 + length:
                return
            body = self.pending[end + 4 : end + 4 + length]
            self.pending = self.pending[end + 4 + length :]
            self._answer(head.split(b" ", 2)[1].decode(), body, got or time.perf_counter())

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        if self.paused is not None:
            stream, self.paused = self.paused, None
            self._pump(stream)

    def _answer(self, path: str, raw: bytes, got: float) -> None:
        if path == "/v1/completions":
            self._complete(json.loads(raw), got)
        elif path == "/tokenize":
            ids = [len(word) for word in str(json.loads(raw).get("prompt")).split()]
            self._json({"count": len(ids), "tokens": ids, "max_model_len": 131072})
        elif path == "/v1/models":
            self._json({"object": "list", "data": [{"id": "loadgen", "object": "model", "max_model_len": 131072}]})
        elif path == "/metrics":
            running = sum(stream.sent < stream.asked for stream in self.server.streams[-256:])
            counts = {"num_requests_running": running, "num_requests_waiting": 0}
            counts |= {"prompt_tokens_total": self.server.prompts, "generation_tokens_total": self.server.tokens}
            self._reply(200, "text/plain", "".join(f"vllm:{name} {n}\n" for name, n in counts.items()).encode())
        else:
            self._json({"version": "0.32.0+loadgen"} if path == "/version" else {}, 200 if path != "/x" else 404)

    def _complete(self, body: dict[str, Any], got: float) -> None:
        prompt = body.get("prompt") or ""
        count = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        stream = Stream(self.server, self.transport, body, count, got)
        self.server.prompts += count
        if not body.get("stream"):
            choice = {"index": 0, "text": "x " * stream.asked, "finish_reason": "length"}
            self.server.count(stream.asked)
            self._json({"object": "text_completion", "choices": [choice], "usage": stream.usage})
            return
        self.server.streams.append(stream)
        if stream.fault == "503":
            self._json({"error": {"message": "overloaded", "code": 503}}, 503)
        elif self.server.burst:
            self._pump(stream)
        else:
            self.server.add(stream)

    def _pump(self, stream: Stream) -> None:
        if stream.burst():
            if self.full:
                self.paused = stream
            else:
                asyncio.get_running_loop().call_soon(self._pump, stream)

    def _json(self, body: object, status: int = 200) -> None:
        self._reply(status, "application/json", json.dumps(body).encode())

    def _reply(self, status: int, kind: str, raw: bytes) -> None:
        head = f"HTTP/1.1 {status} {'OK' if status == 200 else 'Error'}\r\ncontent-type: {kind}\r\ncontent-length: {len(raw)}"
        self.transport.write(head.encode() + b"\r\n\r\n" + raw)


async def _serve(server: Server, port: int) -> None:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, over.set)
    listening = await loop.create_server(lambda: Connection(server), "127.0.0.1", port, backlog=1024)
    print("listening", listening.sockets[0].getsockname()[1], flush=True)
    await over.wait()
    server.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument(
        "--ttft", type=float, default=50, metavar="MS", help="first token, from the arrival of the request"
    )
    parser.add_argument("--itl", type=float, default=10, metavar="MS", help="each further token")
    parser.add_argument("--burst", type=int, default=0, metavar="E", help="unlimited instead: E events a send")
    parser.add_argument("--fault", default="", choices=("", *FAULTS))
    parser.add_argument("--record", required=True, metavar="FILE", help="written at SIGTERM")
    given = parser.parse_args()
    # In paced mode asyncio's own loop: uvloop defers a write, so its time would not be known.
    run = uvloop.run if given.burst else asyncio.run
    run(_serve(Server(given), given.port))


if __name__ == "__main__":
    main()
