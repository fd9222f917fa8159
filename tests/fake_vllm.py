"""HTTP server whose paths answer as a test wants."""

from __future__ import annotations

import asyncio
import json
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SO_LINGER, SOL_SOCKET
from typing import Any, Self

from vllm_repro.client.answer import DEAD_MESSAGE
from vllm_repro.servers.base import Exit, Server, ServerFacts
from vllm_repro.servers.kinds import ServerKind
from vllm_repro_diagnosis.evidence import Evidence

COMPLETION = {
    "choices": [{"index": 0, "text": "x", "finish_reason": "length"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}
_BODY = {
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/CompletionRequest"}}}
}
OPENAPI = {
    "paths": {"/v1/completions": {"post": {"requestBody": _BODY}}, "/health": {"get": {}}},
    "components": {
        "schemas": {"CompletionRequest": {"properties": {"min_tokens": {}, "stop_token_ids": {}}}}
    },
}
METRICS = "vllm:num_requests_running 0.0\nprocess_start_time_seconds 1000.0\n"


class Exchange(BaseHTTPRequestHandler):
    """One request. A test answers it, resets it, stalls it or writes to `wfile`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # it would hold each answer back for 40 ms
    fake: FakeVllm
    body: dict[str, Any]

    def answer(self, status: int, body: object = "", kind: str = "application/json") -> None:
        raw = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def reset(self) -> None:
        """Reset the connection, as a dying process does."""
        self.connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def stall(self) -> None:
        self.fake.closed.wait(60)

    def log_message(self, *_: object) -> None:
        """Write nothing: the test writes the log of this server."""

    def do_GET(self) -> None:  # the name that http.server asks for
        self.body = {}
        self.fake.serve(self)

    def do_POST(self) -> None:  # the name that http.server asks for
        self.body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        self.fake.serve(self)


Handler = Callable[[Exchange], None]


def answering(status: int, body: object = "", kind: str = "application/json") -> Handler:
    return lambda exchange: exchange.answer(status, body, kind)


COMPLETES = answering(200, COMPLETION)


def keeping(bodies: list[dict[str, Any]], then: Handler = COMPLETES) -> Handler:
    """Return a handler that adds each request's body to `bodies`, then answers."""

    def handle(exchange: Exchange) -> None:
        bodies.append(exchange.body)
        then(exchange)

    return handle


def never_ending(exchange: Exchange) -> None:
    exchange.send_response(200)
    exchange.end_headers()
    while True:
        exchange.wfile.write(b"x" * 1_000_000)


class FakeVllm(Server):
    """Healthy server on loopback, except for the paths in `paths`.

    Set `ended` to make its process count as exited.
    """

    def __init__(self, log: Path, paths: Mapping[str, Handler]) -> None:
        self.log_path: Path = log
        log.touch()
        self.ended = threading.Event()
        self.closed = threading.Event()
        self.stops = 0
        self.paths = {
            "/health": answering(200),
            "/version": answering(200, {"version": "0.28.0"}),
            "/v1/models": answering(200, {"data": [{"id": "tiny"}]}),
            "/openapi.json": answering(200, OPENAPI),
            "/metrics": answering(200, METRICS, "text/plain"),
            "/v1/completions": COMPLETES,
            **paths,
        }

    def serve(self, exchange: Exchange) -> None:
        try:
            self.paths[exchange.path](exchange)
        except OSError:
            exchange.close_connection = True

    def die(self, line: str) -> None:
        """Write `line` and answer from now on like an API server whose engine is dead."""
        dead = {"error": {"message": f"{DEAD_MESSAGE} See stack trace (above) for the root cause."}}
        for path in self.paths:
            self.paths[path] = lambda exchange: exchange.answer(
                503 if exchange.path == "/health" else 500, dead
            )
        self.write(line)

    def write(self, line: str) -> None:
        with self.log_path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def __enter__(self) -> Self:
        handler = type("Handler", (Exchange,), {"fake": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]  # resets: usual
        self.base_url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(
            target=socketserver.BaseServer.serve_forever, args=(self._http, 0.02)
        )
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    async def start(self) -> ServerFacts:
        return ServerFacts(kind=ServerKind.PROCESS, evidence=Evidence.CPU, argv=("vllm", "serve"))

    async def exited(self) -> Exit:
        while not self.ended.is_set():
            await asyncio.sleep(0.02)
        return Exit(code=0, detail="the server's process is gone, exit status 0", at=time.time())

    async def stop(self) -> None:
        self.stops += 1
