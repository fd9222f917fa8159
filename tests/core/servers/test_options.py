"""Served model of a run, and required hardware."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_repro.host.machine import Gpu
from vllm_repro.releases.local_vllm import LocalVllm
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import ServedModel
from vllm_repro.servers.options import ServerOptions, lacking, needs_of, tiny_model_of, weights_for
from vllm_repro.servers.process import ProcessSite
from vllm_repro.servers.site import Offer, choose
from vllm_repro.tiny_model import TinyModel

TQ, SCO, DSV4 = find("tq-chunked-prefill"), find("sco-hybrid"), find("dsv4-tp2")
ON_GPUS = [
    TQ,
    SCO,
    DSV4,
    *map(find, ("tq-mtp-cudagraphs", "tq-mtp-first-request", "tq-prefix-hit-unreserved")),
]
DUMMY = ServerOptions(weights="dummy")
SMALL = Gpu(name="RTX 4060", memory_gb=8.0, capability=8.9, driver="580")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path))


@pytest.mark.parametrize("scenario", ON_GPUS, ids=lambda scenario: scenario.id)
def test_dummy_weights_have_the_reported_attention(scenario: Scenario) -> None:
    weights = weights_for(scenario, DUMMY)
    assert weights.dummy
    assert weights.path is not None
    config = json.loads((weights.path / "config.json").read_text(encoding="utf-8"))
    model = scenario.model
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (
        model.heads,
        model.kv_heads,
    )
    assert config["head_dim"] == model.head_dim
    assert (
        config["max_position_embeddings"]
        == model.max_position
        >= (scenario.reported().number("--max-model-len") or 0)
    )
    drafts = "mtp" in (scenario.reported().get("--speculative-config") or "")
    assert config.get("num_nextn_predict_layers", 0) == drafts
    assert config["num_hidden_layers"] <= 4


def test_a_tiny_model_serves_some_unless_real_weights_are_asked() -> None:
    tiny = find("min-tokens-stop-ids")
    assert tiny_model_of(tiny, ServerOptions()) == tiny_model_of(tiny, DUMMY)
    assert tiny_model_of(tiny, DUMMY) == TinyModel(
        heads=16, kv_heads=8, head_dim=128, hidden=256, vocab=151936, max_position=40960
    )
    assert tiny_model_of(tiny, ServerOptions(weights="real")) is None
    assert tiny_model_of(TQ, ServerOptions()) is None
    llama = replace(
        tiny, model=replace(tiny.model, architecture="LlamaForCausalLM", layers=1)
    ).tiny_model
    assert (llama.family, llama.layers) == ("llama", 1) if llama else False


def test_a_model_that_is_named_is_served_with_random_weights(tmp_path: Path) -> None:
    named = ServerOptions(model=str(tmp_path / "own"), weights="dummy")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text("{}", encoding="utf-8")
    assert weights_for(TQ, named) == ServedModel(name="own", path=tmp_path / "own", dummy=True)
    assert weights_for(TQ, ServerOptions(model="org/own", weights="dummy")) == ServedModel(
        name="org/own", dummy=True
    )
    assert weights_for(replace(TQ, dummy=None), DUMMY) == ServedModel(
        name="Qwen/Qwen3.5-9B", dummy=True
    )


def test_which_weights_are_served_is_said_in_words(tmp_path: Path) -> None:
    assert (
        str(weights_for(TQ, DUMMY))
        == "dummy: 1 layer, 16 heads, 4 KV heads of 256, run by vLLM's qwen3"
    )
    assert str(weights_for(TQ, ServerOptions())) == "real, of Qwen/Qwen3.5-9B"
    assert str(ServedModel(name="own", path=tmp_path, dummy=True)) == "dummy, in the shape of own"


def test_a_small_gpu_is_enough_for_a_tiny_model_only() -> None:
    assert "RTX 4060 has 8 GB" in lacking(needs_of(TQ, ServerOptions()), (SMALL,))
    assert not lacking(needs_of(TQ, DUMMY), (SMALL,))
    assert "8 GB" in lacking(
        needs_of(TQ, ServerOptions(model="org/own", weights="dummy")), (SMALL,)
    )
    assert "8 GB" in lacking(needs_of(replace(TQ, dummy=None), DUMMY), (SMALL,))


def test_a_tiny_model_still_needs_gpu_count_and_capability() -> None:
    large = replace(SMALL, memory_gb=80.0)
    assert not lacking(needs_of(TQ, ServerOptions()), (SMALL, large)), (
        "any card of the machine may be leased"
    )
    assert "2 GPUs" in lacking(needs_of(DSV4, DUMMY), (SMALL,))
    assert "capability 8.9" in lacking(needs_of(DSV4, DUMMY), (SMALL, SMALL))


def test_whoever_has_a_small_gpu_is_told_what_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_repro.servers.site.gpus", lambda: (SMALL,))
    monkeypatch.setattr(
        "vllm_repro.servers.process.local_vllm", lambda: LocalVllm(Path("/x/vllm"), "0.23.0")
    )
    monkeypatch.setattr(
        "vllm_repro.servers.docker_site.DockerSite.offer", lambda *_, **__: Offer(False)
    )
    assert choose(TQ, ServerOptions()).why.endswith("has 8 GB; --weights dummy runs on it")
    assert choose(TQ, DUMMY).kind is ServerKind.PROCESS
    assert "--weights dummy" not in choose(DSV4, ServerOptions()).why


def test_a_process_on_a_small_gpu_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_repro.servers.process.gpus", lambda: (SMALL,))
    monkeypatch.setattr(
        "vllm_repro.servers.process.local_vllm", lambda: LocalVllm(Path("/x/vllm"), "0.23.0")
    )
    assert ProcessSite(DUMMY, TQ, lambda _: None).cannot(TQ.arms[0]) == ""
    assert "8 GB" in ProcessSite(ServerOptions(), TQ, lambda _: None).cannot(TQ.arms[0])
