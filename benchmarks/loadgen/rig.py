"""One run of a client against a server, each on a core, matched with the server's record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.loadgen.driver import Done
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.releases.sources import Source

SERVER_CORE, CLIENT_CORE = [*sorted(os.sched_getaffinity(0)) * 2][:2]
VLLM = "0.32.0"


@dataclass(frozen=True)
class Shape:
    """A load: requests at a time, requests, and tokens of each answer."""

    streams: int
    requests: int
    tokens: int = 100


@dataclass(frozen=True)
class Client:
    """A load generator. read: the requests by its report in the folder."""

    argv: Callable[[Shape, str, Path], list[str]]
    read: Callable[[Path], list[Done]]


@dataclass(frozen=True)
class Run:
    """The requests by client's report and server's record, and the client's processor seconds."""

    done: list[Done]
    record: list[dict[str, Any]]
    cpu_s: float

    def matched(self) -> Iterator[tuple[Done, dict[str, Any]]]:
        for done in self.done:
            yield done, self.record[int(done["text"].split()[0].removeprefix("r"))]

    def ttft_errors(self) -> list[float]:
        """Return the differences of client and server in seconds, sorted."""
        return sorted(
            abs((done["times"][0] - done["sent"]) - (true["times"][0] - true["got"]))
            for done, true in self.matched()
        )

    def itl_errors(self) -> list[float]:
        """Return the same of the gaps between tokens."""
        return sorted(
            abs((b - a) - (d - c))
            for done, true in self.matched()
            for a, b, c, d in zip(
                done["times"], done["times"][1:], true["times"], true["times"][1:], strict=False
            )
        )


def driven(name: str) -> Client:
    """Return a client of `driver.py`."""

    def argv(shape: Shape, url: str, folder: Path) -> list[str]:
        words = [
            name,
            url,
            str(shape.streams),
            str(shape.requests),
            str(shape.tokens),
            str(folder / "done.json"),
        ]
        return [sys.executable, "-m", "benchmarks.loadgen.driver", *words]

    return Client(argv, lambda folder: list(json.loads((folder / "done.json").read_text())))


def vllm_bench() -> Client | None:
    """Return `vllm bench serve` of a release in the cache; None if it is not there."""
    release = ReleaseCache().get(Source(release=VLLM))
    if release is None:
        return None
    vllm = Path(release.python).with_name("vllm")

    def argv(shape: Shape, url: str, folder: Path) -> list[str]:
        return [
            *(
                str(vllm),
                "bench",
                "serve",
                "--backend",
                "openai",
                "--base-url",
                url,
                "--endpoint",
                "/v1/completions",
            ),
            *(
                "--model",
                "loadgen",
                "--tokenizer",
                str(_tokenizer(folder)),
                "--dataset-name",
                "random",
            ),
            *("--random-input-len", "32", "--random-output-len", str(shape.tokens), "--ignore-eos"),
            *(
                "--num-prompts",
                str(shape.requests),
                "--max-concurrency",
                str(shape.streams),
                "--disable-tqdm",
            ),
            *(
                "--save-result",
                "--save-detailed",
                "--result-dir",
                str(folder),
                "--result-filename",
                "done.json",
            ),
        ]

    def read(folder: Path) -> list[Done]:
        found = json.loads((folder / "done.json").read_text())
        done: list[Done] = []
        columns = (found[name] for name in ("generated_texts", "start_times", "ttfts", "itls"))
        for text, sent, ttft, itls in zip(*columns, strict=True):
            times = [sent + ttft]
            for itl in itls:
                times.append(times[-1] + itl)
            done.append({"text": text, "sent": sent, "times": times})
        return done

    return Client(argv, read)


def _tokenizer(folder: Path) -> Path:
    """Write a tokenizer of 1,000 words, so that none is downloaded."""
    vocabulary = {f"w{number}": number for number in range(1000)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "w0"}
    parts: dict[str, Any] = dict.fromkeys(
        ("truncation", "padding", "normalizer", "post_processor", "decoder")
    )
    whole = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": model,
        **parts,
    }
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "w0",
        "model_max_length": 131072,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "max_position_embeddings": 131072})
    )
    return folder


def run(client: Client, shape: Shape, *, ttft: float = 0.05, itl: float = 0.01) -> Run:
    """Run a client against a server of its own.

    ttft, itl: seconds to the first token, and to each further one.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-repro-loadgen-") as name:
        folder = Path(name)
        words = [
            sys.executable,
            "-m",
            "benchmarks.loadgen.server",
            str(ttft),
            str(itl),
            str(folder / "record.json"),
        ]
        with subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, {SERVER_CORE}),
        ) as serving:
            try:
                assert serving.stdout is not None
                url = f"http://127.0.0.1:{serving.stdout.readline().split()[1]}"
                with (folder / "output.txt").open("wb") as output:
                    process = subprocess.Popen(
                        client.argv(shape, url, folder),
                        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        preexec_fn=lambda: os.sched_setaffinity(0, {CLIENT_CORE}),
                    )
                    _, status, used = os.wait4(process.pid, 0)
                    process.returncode = status  # `wait4` has taken it
            finally:
                serving.terminate()
        if status:
            raise RuntimeError(
                f"the client failed: {(folder / 'output.txt').read_text(errors='replace')[-1000:]}"
            )
        record = json.loads((folder / "record.json").read_text())
        return Run(client.read(folder), record, used.ru_utime + used.ru_stime)
