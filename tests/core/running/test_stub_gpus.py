"""Runs on four stub cards: stubs of nvidia-smi and of a vllm with GPUs (fixtures/gpu_stubs).

They say nothing about a GPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.commands import WITHOUT_SDK, until
from tests.conftest import GPU_STUBS, Harness, StubGpus
from tests.scenario_texts import text_of
from vllm_repro.journal.journal import read


@pytest.fixture
def suite(
    tmp_path: Path, stub_gpus: StubGpus, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Return a function that writes a scenario; the stub vllm is on PATH."""
    assert stub_gpus.servers.is_dir()
    monkeypatch.setenv("PATH", str(GPU_STUBS), prepend=":")
    monkeypatch.setenv("VLLM_REPRO_REPORTS", str(tmp_path / "reports"))
    folder = tmp_path / "scenarios"
    folder.mkdir()

    def write(name: str, seconds: float = 0.5, gpus: int = 1) -> None:
        text = text_of("min_tokens_stop_ids.py").replace("Qwen/Qwen3-0.6B", f"org/boot-{seconds}s")
        text = text.replace('id="min-tokens-stop-ids"', f'id="{name}"')
        text = text.replace("Needs(memory_gb=6)", f"Needs(gpus={gpus})")
        (folder / f"{name}.py").write_text(text, encoding="utf-8")

    return write


def scenarios_with(workers: int, tmp_path: Path) -> subprocess.Popen[str]:
    """Start `pytest scenarios -n WORKERS` on the stub vllm."""
    (tmp_path / "conftest.py").write_text(WITHOUT_SDK, encoding="utf-8")
    words = "scenarios -k near-miss --scenario-server process --scenario-weights real"
    options = f"-n {workers} -p no:cacheprovider -rA"
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *words.split(), *options.split()],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )


def servers(stub_gpus: StubGpus) -> list[dict[str, Any]]:
    """Return what each server wrote about itself."""
    return [
        json.loads(path.read_text(encoding="utf-8")) for path in stub_gpus.servers.glob("*.json")
    ]


def shared(served: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Return the pairs of servers that used a card at the same time."""
    return [
        (one, other)
        for one, other in combinations(sorted(served, key=lambda server: server["start"]), 2)
        if set(one["cards"]) & set(other["cards"]) and other["start"] < one["end"]
    ]


def test_workers_share_no_card_and_a_killed_one_frees_its_card(
    suite: Callable[..., None], stub_gpus: StubGpus, tmp_path: Path
) -> None:
    stub_gpus.say(cards=[{}, {}])
    suite("a-killed", seconds=600)
    suite("b-two-cards", gpus=2)  # waits for the card of the killed one
    suite("c-one-card")
    suite("d-one-card")
    run = scenarios_with(2, tmp_path)

    def beside_it() -> list[dict[str, Any]]:
        return [server for server in servers(stub_gpus) if "boot-600s" not in server["model"]]

    until(lambda: len(servers(stub_gpus)) > len(beside_it()) > 0, seconds=200)
    (killed,) = (server for server in servers(stub_gpus) if "boot-600s" in server["model"])
    assert killed["cards"] != beside_it()[0]["cards"], "they ran side by side"
    os.kill(killed["harness"], signal.SIGKILL)
    killed_at = time.time()
    out, _ = run.communicate(timeout=400)
    assert "1 failed, 3 passed" in out, out
    assert "crashed while running 'scenarios/a-killed.py::a-killed[near-miss]'" in out
    served = [server | {"end": server.get("end", killed_at)} for server in servers(stub_gpus)]
    assert (sorted(len(server["cards"]) for server in served), shared(served)) == ([1, 1, 1, 2], [])


def test_a_card_that_is_not_free_between_boots_is_infra(
    suite: Callable[..., None],
    stub_gpus: StubGpus,
    harness: Harness,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllm_repro.host.gpu_lease._DRAIN_S", 4.0)
    suite("leaks", seconds=0)
    stub_gpus.say(cards=[{"memory.used": [4, 4, 50000, 4, 60000]}])
    words = "--server process --weights real --arm near-miss --trials 3"
    done = harness("run", str(tmp_path / "scenarios" / "leaks.py"), *words.split())
    assert done.status == 2, done.out + done.err
    assert done.outcomes == {"near-miss": [*["untriggered"] * 2, *["infra"] * 2]}
    why = done.report["arms"][0]["trials"][-1]["why"]
    assert "GPU 0 (stub of an H200) is busy: 60,000 MiB of it are in use" in why
    assert "vllm-repro clean" in why
    waited = [event["waited_s"] for event in read(done.run / "journal.jsonl").of("gpus-free")]
    assert (len(waited), [server["cards"] for server in servers(stub_gpus)]) == (2, [["0"], ["0"]])
