"""Helpers for tests of servers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from tests.skipping import cannot_run
from vllm_repro.errors import InfraError
from vllm_repro.servers.base import Server, ServerFacts
from vllm_repro.servers.docker import DockerServer
from vllm_repro.servers.docker_engine import RUN_LABEL, Engine, connect

IDLE = "import time; print('up'); time.sleep(600)"
"""A program that prints that it is up, and stays."""


def engine_or_reason(environment: Mapping[str, str]) -> Engine:
    """Return the engine. Fail instead of skip where CI installs one."""
    try:
        return connect(environment)
    except InfraError as error:
        cannot_run(
            f"{error}. Start one with: export DOCKER_HOST=$(.ci/dockerd.sh start)", environment
        )


def containers_of(engine: Engine, run: str) -> Any:
    """Return all containers of a run."""
    return engine.client.api.containers(all=True, filters={"label": f"{RUN_LABEL}={run}"})


async def until_logged(server: DockerServer, text: str, *, seconds: float = 30) -> None:
    """Wait until `text` is in the server's log.

    Fail if the server exits first or after `seconds`.
    """
    ended = asyncio.create_task(server.exited())
    deadline = time.monotonic() + seconds
    try:
        while text not in (log := server.log_path.read_text()):
            assert not ended.done(), f"{ended.result().detail} before {text!r} came: {log}"
            assert time.monotonic() < deadline, f"{text!r} never came: {log}"
            await asyncio.sleep(0.02)
    finally:
        ended.cancel()


@contextlib.asynccontextmanager
async def running(server: Server) -> AsyncIterator[ServerFacts]:
    """Start a server, and stop it at the end."""
    try:
        yield await server.start()
    finally:
        await server.stop()
