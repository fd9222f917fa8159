"""The clients of the rig as commands: how each is started, and what its own report says of each request.

- vllm bench serve is that of a release in the cache.
- inference-perf is installed once, into the cache too. It needs Python 3.12.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from uv import find_uv_bin

from benchmarks.loadgen.driver import CLIENTS, Done
from vllm_repro.releases.disk import cache_root
from vllm_repro.releases.installer import uv_settings
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import Source

VLLM = "0.32.0"
INFERENCE_PERF = "0.7.0"
COMMAND = "vllm-repro run"
SCENARIOS = Path(__file__).parent / "scenarios"


@dataclass(frozen=True)
class Shape:
    """A load: requests, how many at a time, and tokens of each answer. light: no times of single tokens are needed."""

    streams: int
    requests: int
    tokens: int = 100
    light: bool = False


@dataclass(frozen=True)
class Client:
    """A load generator. argv: its command for a load, a server and a folder; read: the requests by its report in that folder."""

    name: str
    argv: Callable[[Shape, str, Path], list[str]]
    read: Callable[[Path], list[Done]]
    env: Mapping[str, str] = field(default_factory=dict)


def driven(name: str) -> Client:
    """Return a client library under the closed loop of `driver.py`."""

    def argv(shape: Shape, url: str, folder: Path) -> list[str]:
        words = [sys.executable, "-m", "benchmarks.loadgen.driver", name, "--url", url, "-c", str(shape.streams)]
        words += ["-n", str(shape.requests), "--tokens", str(shape.tokens), "--out", str(folder / "done.json")]
        return words + (["--light"] if shape.light else [])

    def read(folder: Path) -> list[Done]:
        done: list[Done] = json.loads((folder / "done.json").read_text())
        return done

    return Client(name, argv, read)


def command() -> Client:
    """Return the harness's own command on an attached server, without `--throughput`: one small request."""

    def argv(_: Shape, url: str, folder: Path) -> list[str]:
        words = [sys.executable, "-m", "vllm_repro", "run", "loadgen", "--scenarios", str(SCENARIOS)]
        return [*words, "--server", "attach", "--url", url, "--expect", "alive", "--out", str(folder)]

    return Client(COMMAND, argv, lambda _: [])


def vllm_bench(tokenizer: Path) -> Client | str:
    """Return `vllm bench serve`, or why there is none."""
    release = ReleaseCache().get(Source(release=VLLM))
    if release is None:
        return f"vLLM {VLLM} is not in the cache; a `vllm-repro run --vllm {VLLM}` installs it"
    vllm = Path(release.python).with_name("vllm")

    def argv(shape: Shape, url: str, folder: Path) -> list[str]:
        words = [str(vllm), "bench", "serve", "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"]
        words += ["--model", "loadgen", "--tokenizer", str(tokenizer), "--dataset-name", "random", "--ignore-eos"]
        words += ["--random-input-len", "32", "--random-output-len", str(shape.tokens), "--disable-tqdm"]
        words += ["--num-prompts", str(shape.requests), "--max-concurrency", str(shape.streams), "--save-result"]
        words += [] if shape.light else ["--save-detailed"]
        return [*words, "--result-dir", str(folder), "--result-filename", "done.json"]

    def read(folder: Path) -> list[Done]:
        found = json.loads((folder / "done.json").read_text())
        columns = ("generated_texts", "start_times", "ttfts", "itls", "errors")
        done: list[Done] = []
        for text, sent, ttft, itls, error in zip(*(found.get(column, ()) for column in columns), strict=True):
            times = [sent + ttft]
            for itl in itls:
                times.append(times[-1] + itl)
            done.append({"text": text, "sent": sent, "times": times, "error": error})
        return done

    return Client("vllm bench serve", argv, read, {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"})


def inference_perf(tokenizer: Path) -> Client | str:
    """Return inference-perf with one worker, or why there is none. Install it if it is not in the cache yet."""
    home = cache_root() / "peers" / f"inference-perf-{INFERENCE_PERF}"
    program = home / "bin" / "inference-perf"
    if not program.exists() and (why := _install(home)):
        shutil.rmtree(home, ignore_errors=True)
        return f"inference-perf {INFERENCE_PERF} cannot be installed: {why}"

    def argv(shape: Shape, url: str, folder: Path) -> list[str]:
        def exactly(size: int) -> dict[str, Any]:
            return {
                "type": "fixed",
                "min": size,
                "max": size,
                "mean": size,
                "std_dev": 0,
                "total_count": shape.requests,
            }

        stage = {"num_requests": shape.requests, "concurrency_level": shape.streams}
        workers = {"num_workers": 1, "worker_max_concurrency": shape.streams}
        report = {"per_request": not shape.light, "per_stage": False, "per_adapter": False}
        config = {
            "api": {"type": "completion", "streaming": True},
            "data": {"type": "random", "input_distribution": exactly(32), "output_distribution": exactly(shape.tokens)},
            "load": {"type": "concurrent", "stages": [stage], **workers},
            "server": {"type": "vllm", "model_name": "loadgen", "base_url": url, "ignore_eos": True},
            "tokenizer": {"pretrained_model_name_or_path": str(tokenizer)},
            "report": {"request_lifecycle": {"summary": True, **report}},
            "storage": {"local_storage": {"path": str(folder)}},
        }
        (folder / "config.json").write_text(json.dumps(config))  # JSON is YAML, too
        return [str(program), "-c", str(folder / "config.json")]

    def read(folder: Path) -> list[Done]:
        done: list[Done] = []
        for one in json.loads((folder / "per_request_lifecycle_metrics.json").read_text()):
            metrics = ((one.get("info") or {}).get("response_metrics")) or {}
            chunks = metrics.get("response_chunks") or []
            text = json.loads(chunks[0])["choices"][0]["text"] if chunks else ""
            error = str(one["error"] or "")
            done.append(
                {"text": text, "sent": one["start_time"], "times": metrics.get("chunk_times") or [], "error": error}
            )
        return done

    return Client("inference-perf", argv, read, {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"})


def _install(home: Path) -> str:
    """Install inference-perf into `home`. Return why it cannot be; empty if it is there."""
    environment = {**os.environ, **uv_settings(os.environ), "VIRTUAL_ENV": str(home)}
    uv = find_uv_bin()
    for words in (
        ["venv", "--quiet", "--python", "3.12", str(home)],
        ["pip", "install", "--quiet", f"inference-perf=={INFERENCE_PERF}"],
    ):
        ran = subprocess.run([uv, *words], env=environment, capture_output=True, text=True, check=False)
        if ran.returncode:
            return (ran.stderr.strip().splitlines() or ["no reason given"])[-1]
    return ""


def make_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of 1,000 words, so that no peer has to download one."""
    folder.mkdir()
    vocabulary = {f"w{number}": number for number in range(1000)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    parts = {"normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None}
    whole: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        **parts,
        "model": model,
    }
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "model_max_length": 131072}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 131072}))
    return folder


def clients(tokenizer: Path) -> tuple[dict[str, Client], list[str]]:
    """Return all clients of this machine by name, and why others are missing."""
    found = [*map(driven, CLIENTS), command(), vllm_bench(tokenizer), inference_perf(tokenizer)]
    return {one.name: one for one in found if isinstance(one, Client)}, [one for one in found if isinstance(one, str)]
