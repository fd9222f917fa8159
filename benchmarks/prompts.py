"""Calls of `/tokenize`, and seconds, for a chat prompt of an exact length.

Measured on the rehearsal engine and on a real release. The first prompt of each length is also sent, and the server's usage must show
the same length. A second server with a short `--max-model-len` shows whether `/tokenize` counts prompts that it would refuse.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from vllm_repro.client.client import Client
from vllm_repro.client.prompts import build_chat
from vllm_repro.errors import ReproError
from vllm_repro.host.ports import free_port
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import Source
from vllm_repro.releases.tiny_model_folder import make_tiny_model
from vllm_repro.resources import rehearsal_engine
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import CPU_ENV, OFFLINE_ENV
from vllm_repro.servers.process import ProcessServer
from vllm_repro.tiny_model import TinyModel
from vllm_repro_diagnosis.evidence import Evidence

VERSION = "0.28.0"
SIZES = (100, 4225, 7593, 90_000)
LONG, SHORT = 131_072, 8192
FLAGS = "--dtype bfloat16 --max-num-batched-tokens 8192 --max-num-seqs 2 --enforce-eager"


@dataclass(frozen=True)
class Built:
    """One prompt: calls of `/tokenize`, seconds, and the reported prompt length if it was sent."""

    calls: int
    seconds: float
    served: str


@contextlib.asynccontextmanager
async def serving(argv: tuple[str, ...], env: dict[str, str], folder: Path) -> AsyncIterator[Client]:
    """Serve on a free loopback port while the block runs. Raise `RuntimeError` if the server does not start."""
    port = free_port()
    rehearsal = "VLLM_REHEARSAL_VERSION" in env
    server = ProcessServer(
        (*argv, "--host", "127.0.0.1", "--port", str(port)),
        port=port,
        log=folder / "server.log",
        env=env,
        kind=ServerKind.REHEARSAL if rehearsal else ServerKind.PROCESS,
        evidence=Evidence.REHEARSAL if rehearsal else Evidence.CPU,
    )
    try:
        await server.start()
        ended = asyncio.create_task(server.exited())
        async with Client(server.base_url) as client:
            while not await _healthy(client):
                if ended.done():
                    raise RuntimeError((folder / "server.log").read_text(encoding="utf-8", errors="replace")[-2000:])
                await asyncio.sleep(0.1)
            yield client
            ended.cancel()
    finally:
        await server.stop()


async def _healthy(client: Client) -> bool:
    with contextlib.suppress(httpx.HTTPError):  # not up yet
        return (await client.get("/health")).status_code == 200
    return False


async def build(client: Client, model: str, tokens: int, seed: str, *, serve: bool) -> Built:
    began = time.monotonic()
    prompt = await build_chat(client, model, tokens, seed)
    seconds = time.monotonic() - began
    served = ""
    if serve:
        body = {"model": model, **prompt.body, "max_tokens": 1, "temperature": 0}
        answer = await client.ask("/v1/chat/completions", body)
        served = f"HTTP {answer.status}" if answer.usage is None else f"{answer.usage.prompt_tokens}"
    return Built(prompt.calls, seconds, served)


async def measure(title: str, client: Client, seeds: int) -> None:
    """Measure one server and print its table."""
    model = await client.model_name()
    print(f"\n### {title}, n={seeds} seeds\n")
    print("| tokens | calls: each seed | seconds: median (min..max) | tokens that a request with it was told |")
    print("|---|---|---|---|")
    for tokens in SIZES:
        built = [await build(client, model, tokens, f"bench/{seed}", serve=seed == 0) for seed in range(seeds)]
        seconds = [one.seconds for one in built]
        middle, low, high = (f"{value:.3f}" for value in (statistics.median(seconds), min(seconds), max(seconds)))
        calls = " ".join(str(one.calls) for one in built)
        print(f"| {tokens:,} | {calls} | {middle} ({low}..{high}) | {built[0].served} |", flush=True)


def _serve(engine: tuple[str, ...], model: str, length: int, flags: str = FLAGS) -> tuple[str, ...]:
    return (*engine, "serve", model, *flags.split(), "--max-model-len", str(length))


async def rehearsal(seeds: int, folder: Path) -> None:
    argv = _serve((sys.executable, str(rehearsal_engine())), "tiny/model", LONG)
    async with serving(argv, {"VLLM_REHEARSAL_VERSION": VERSION}, folder) as client:
        await measure("REHEARSAL engine (REHEARSAL: its tokenizer is not vLLM's)", client, seeds)


async def release(seeds: int, folder: Path) -> None:
    found = ReleaseCache().get(Source(release=VERSION))
    if found is None:
        print(f"not measured: vLLM {VERSION} is not in the cache; a `vllm-repro run` installs it")
        return
    model = make_tiny_model(folder / "tiny-long", TinyModel(max_position=LONG))
    env = {**CPU_ENV, **OFFLINE_ENV}
    flags = f"{FLAGS} --load-format dummy"
    async with serving(_serve((str(found.executable),), str(model), LONG, flags), env, folder) as client:
        await measure(f"vLLM {VERSION}, --max-model-len {LONG}", client, seeds)
    async with serving(_serve((str(found.executable),), str(model), SHORT, flags), env, folder) as client:
        name = await client.model_name()
        for tokens in SIZES:
            print(f"\nvLLM {VERSION}, --max-model-len {SHORT}, {tokens:,} tokens: ", end="")
            try:
                one = await build(client, name, tokens, "bench/short", serve=True)
                print(f"{one.calls} calls; a request with it: {one.served}")
            except httpx.HTTPStatusError as error:
                print(f"/tokenize answers {error.response.status_code}: {error.response.text[:300]}")
            except ReproError as error:
                print(f"{error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10, metavar="N")
    parser.add_argument("--only", choices=("rehearsal", "release"))
    given = parser.parse_args()
    for name, one in (("rehearsal", rehearsal), ("release", release)):
        if given.only in (None, name):
            with tempfile.TemporaryDirectory(prefix=f"vllm-repro-bench-{os.getpid()}-") as folder:
                asyncio.run(one(given.seeds, Path(folder)))


if __name__ == "__main__":
    main()
