"""The launch of `sco-hybrid` (vLLM #42085) in the lab: model shape, sizes and listed differences."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.core.running.test_trial import trial_on
from tests.fake_vllm import COMPLETION, Exchange, FakeVllm
from vllm_repro.journal.journal import read
from vllm_repro.running.assess import assess
from vllm_repro.running.state import Observed
from vllm_repro.running.trial import run_trial
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.scenario import Arm
from vllm_repro.scenario.workload import Request, Size
from vllm_repro.servers.base import ServerFacts
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.lab import lab_model, plugin_folder
from vllm_repro.servers.lab_launch import lab_launch
from vllm_repro.servers.launch import Launch
from vllm_repro.trigger.trigger import SentRequest
from vllm_repro.verdict.outcome import Outcome
from vllm_repro_diagnosis.evidence import Evidence

SCO = find("sco-hybrid")
TQ = find("tq-chunked-prefill")


def arm(name: str) -> Arm:
    found = SCO.arm(name)
    assert found is not None
    return found


def launch_of(name: str) -> Launch:
    return lab_launch(
        SCO,
        arm(name),
        vllm=("/r/bin/vllm",),
        version="0.21.0",
        plugin=plugin_folder(),
        model=Path("/m/tiny"),
        port=8001,
    )


def test_differing_prompt_sizes_are_listed() -> None:
    shown = "prompts of 5693 tokens in place of 90109, sized for the tiny model"
    assert launch_of("reported").differences.count(shown) == 1
    assert (
        launch_of("near-miss-length").differences.count(
            shown.replace("5693", "5664").replace("90109", "90112")
        )
        == 1
    )
    assert not any(text.startswith("prompts of") for text in lab_launch(
        TQ, TQ.arms[0], vllm=("v",), version="0.23.0", plugin=plugin_folder(), model=Path("/m"), port=1
    ).differences)  # fmt: skip


def test_the_lab_command_keeps_what_the_bug_needs() -> None:
    command = launch_of("reported").command
    assert command.enabled("--disable-hybrid-kv-cache-manager") is False
    assert command.has("--enable-prefix-caching")
    assert (command.number("--block-size"), command.number("--num-gpu-blocks-override")) == (
        32,
        330,
    )
    assert command.number("--max-num-batched-tokens") == 2048
    transfer = json.loads(command.get("--kv-transfer-config") or "")
    assert (transfer["kv_connector"], transfer["kv_role"]) == (
        "SimpleCPUOffloadConnector",
        "kv_both",
    )
    assert launch_of("reported").env["REPRO_LAB_MECHANISM"] == "offload"


def test_the_arms_differ_by_what_their_names_say() -> None:
    assert not launch_of("sco-off").command.has("--kv-transfer-config")
    assert launch_of("hybrid-off").command.enabled("--disable-hybrid-kv-cache-manager") is True
    assert launch_of("bigger-pool").command.number("--num-gpu-blocks-override") == 1000
    for name, key, value in (
        ("lazy", "lazy_offload", True),
        ("small-cpu-pool", "cpu_bytes_to_use", 160 * 8192),
    ):
        transfer = json.loads(launch_of(name).command.get("--kv-transfer-config") or "")
        assert transfer["kv_connector_extra_config"][key] == value


def test_each_model_shape_has_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path))
    assert SCO.lab is not None
    assert TQ.lab is not None
    folder = lab_model(SCO.lab, SCO.model)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["layer_types"] == ["full_attention", "sliding_attention"]
    assert (config["sliding_window"], config["num_attention_heads"], config["head_dim"]) == (
        128,
        4,
        32,
    )
    others = {
        lab_model(lab, SCO.model)
        for lab in (replace(SCO.lab, window=64), replace(SCO.lab, layers=["sliding"]))
    }
    assert len({folder, *others}) == 3


@pytest.mark.parametrize(("kind", "tokens"), [(ServerKind.LAB, 5693), (ServerKind.PROCESS, 90_109)])
def test_a_trial_sends_the_lab_its_own_sizes(tmp_path: Path, kind: ServerKind, tokens: int) -> None:
    def tokenize(exchange: Exchange) -> None:
        words = sum(len(str(message["content"]).split()) for message in exchange.body["messages"])
        exchange.answer(200, {"count": words, "tokens": [0] * words})

    paths = {
        "/tokenize": tokenize,
        "/v1/chat/completions": lambda exchange: exchange.answer(200, COMPLETION),
    }
    with FakeVllm(tmp_path / "log", paths) as fake:
        trial = trial_on(fake, tmp_path)
        trial.scenario, trial.arm = SCO, SCO.arms[0]
        trial.launch = Launch(kind=kind, evidence=Evidence.LAB, command=SCO.command_of(trial.arm))
        with trial.journal, trial.requests:
            asyncio.run(run_trial(trial))
    sent = list(read(tmp_path / "journal.jsonl").of("request-sent"))
    assert [entry["prompt_tokens"] for entry in sent] == [tokens, tokens]


@pytest.mark.parametrize(
    ("kind", "outcome"),
    [(ServerKind.LAB, Outcome.CLEAN), (ServerKind.PROCESS, Outcome.UNTRIGGERED)],
)
def test_the_boundary_is_computed_for_the_model_that_is_served(
    tmp_path: Path, kind: ServerKind, outcome: Outcome
) -> None:
    asked = [SentRequest("prompt A", 5693, cached_tokens=0, answer_tokens=8)]
    seen = Observed(
        ServerFacts(kind=kind, evidence=Evidence.LAB, argv=()),
        ready=True,
        asked=asked,
        canary_ok=True,
    )
    assert assess(SCO, launch_of("reported").command, seen, tmp_path / "no log").outcome is outcome


def test_near_misses_differ_from_the_report_by_one_thing() -> None:
    lengths = {
        request.prompt
        for request in arm("near-miss-length").workload or ()
        if isinstance(request, Request)
    }
    answers = {
        request.max_tokens
        for request in arm("near-miss-answer").workload or ()
        if isinstance(request, Request)
    }
    (length,) = lengths
    assert isinstance(length, Size)
    assert length.lab is not None
    assert (length.plus % 256, length.lab % 32) == (0, 0)
    assert answers == {3}


def test_differing_flags_are_listed() -> None:
    assert SCO.command_of(arm("bigger-pool")).number("--num-gpu-blocks-override") == 50_000
    assert launch_of("bigger-pool").command.number("--num-gpu-blocks-override") == 1000
    shown = (
        "with --num-gpu-blocks-override 1000 in place of --num-gpu-blocks-override 50000, sized for"
        " the tiny model's pool"
    )
    assert launch_of("bigger-pool").differences.count(shown) == 1
    assert shown not in launch_of("reported").differences
