"""Tiny models on real releases: they read the folders and accept the reported flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers.launch import process_launch
from vllm_repro.servers.options import ServerOptions, weights_for
from vllm_repro_diagnosis.evidence import Evidence

pytestmark = [pytest.mark.live, pytest.mark.depends("search")]

FOLDER = Path(__file__).parent


def words(name: str, *, quantized: bool = False) -> list[str]:
    """Return what follows `vllm serve` for the reported arm with dummy weights."""
    scenario = find(name)
    weights = weights_for(scenario, ServerOptions(weights="dummy"))
    launch = process_launch(
        scenario,
        scenario.arms[0],
        vllm=("vllm",),
        env={},
        weights=weights,
        port=8000,
        evidence=Evidence.GPU,
    )
    argv = [word.replace("<HEAD_IP>", "127.0.0.1") for word in launch.argv[2:]]
    return [*argv, "--quantization", "auto_round"] if quantized else argv


def read(version: str, script: str, asked: object) -> list[dict[str, Any]]:
    """Return the answer of a script of this folder, run by a release's interpreter."""
    release = provision(Source(release=version))
    environment = {**os.environ, "PYTHONPATH": str(release.packages), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [release.python, FOLDER / script],
        input=json.dumps(asked),
        env=environment | {"VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=1800,
    )
    sys.stdout.write(done.stderr[-4000:])
    (answer,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found: list[dict[str, Any]] = json.loads(answer.removeprefix("FOUND "))
    return found


def test_0_21_takes_the_tiny_models_and_their_commands() -> None:
    names = [
        "tq-chunked-prefill",
        "tq-prefix-hit-unreserved",
        "tq-mtp-first-request",
        "sco-hybrid",
        "dsv4-tp2",
    ]
    found = dict(
        zip(names, read("0.21.0", "engine_config.py", [words(name) for name in names]), strict=True)
    )
    for name, facts in found.items():
        model = find(name).model
        ranks = 2 if model.kv_heads == 1 else 1  # both DeepSeek-V4 reports use two
        assert facts.get("head_size") == model.head_dim, facts
        assert (facts["heads"], facts["kv_heads"]) == (model.heads // ranks, model.kv_heads)
        assert facts["longest"] == find(name).reported().number("--max-model-len")
        assert (facts["weights"], facts["skipped"]) == ("dummy", [])
        assert "hello" in facts["chat"]
    assert found["tq-chunked-prefill"]["cache"] == "turboquant_4bit_nc"
    assert found["tq-mtp-first-request"]["drafter"] == "MiMoMTPModel"
    assert (
        found["sco-hybrid"]["architecture"]
        == found["dsv4-tp2"]["architecture"]
        == "DeepseekV4ForCausalLM"
    )
    assert found["dsv4-tp2"]["tokenizer_mode"] == "deepseek_v4"


def test_0_20_takes_all_but_an_unknown_quantization() -> None:
    mtp, refused = read(
        "0.20.2",
        "engine_config.py",
        [words("tq-mtp-cudagraphs"), words("tq-mtp-cudagraphs", quantized=True)],
    )
    assert (mtp.get("drafter"), mtp.get("cache"), mtp.get("head_size")) == (
        "MiMoMTPModel",
        "turboquant_k8v4",
        256,
    ), mtp
    assert "Unknown quantization method: auto_round" in refused["error"]
