"""What is run for a reported command, and the reported differences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.scenario import Scenario
from vllm_repro.servers.launch import (
    CONTAINER_MODEL,
    FIRST_RUNNER,
    Launch,
    ServedModel,
    container_launch,
    process_launch,
)
from vllm_repro_diagnosis.evidence import Evidence

FOLDER = Path("/m/made")


def launch(scenario: Scenario, name: str = "reported") -> Launch:
    arm, tiny_model = scenario.arm(name), scenario.tiny_model
    assert arm is not None
    weights = ServedModel(name="made", path=FOLDER, dummy=True, tiny_model=tiny_model)
    return process_launch(
        scenario, arm, vllm=("vllm",), env={}, weights=weights, port=1, evidence=Evidence.GPU
    )


def cpu_bytes(found: Launch) -> int:
    config = json.loads(found.command.get("--kv-transfer-config") or "")
    return int(config["kv_connector_extra_config"]["cpu_bytes_to_use"])


def test_flags_that_a_tiny_model_drops_are_differences() -> None:
    mtp = find("tq-mtp-cudagraphs")
    found = launch(mtp)
    assert mtp.dummy is not None
    kept = replace(
        mtp.reported().without("--quantization").with_model(str(FOLDER)), env=(FIRST_RUNNER,)
    )
    assert found.command.without("--load-format", "--host", "--port") == kept
    assert found.differences[:4] == (
        (
            f"model: dummy weights in the shape {mtp.tiny_model}, in place of the reported one"
            f" ({mtp.dummy.why})"
        ),
        (
            "without --quantization: vLLM refuses the quantization of the reported weights for a"
            " model without them"
        ),
        (
            "VLLM_USE_V2_MODEL_RUNNER=0: from 0.22 on vLLM chooses the model runner by"
            " architecture, and the reported model has the first"
        ),
        "--load-format dummy: random weights, since this death does not depend on them",
    )
    assert (
        found.weights
        == "dummy: 1 layer and 1 that drafts, 24 heads, 4 KV heads of 256, run by vLLM's mimo"
    )
    assert found.tiny_model == mtp.tiny_model


@pytest.mark.parametrize(
    "name", ["tq-prefix-hit-unreserved", "sco-lazy-starves", "min-tokens-stop-ids"]
)
def test_a_tiny_model_of_the_same_architecture_keeps_flags(name: str) -> None:
    found = launch(find(name))
    assert found.command.env == find(name).reported().env
    assert not any("MODEL_RUNNER" in text for text in found.differences)


def test_a_reported_key_is_no_part_of_a_command() -> None:
    tq = find("tq-chunked-prefill")
    found = launch(replace(tq, command=f"{tq.command} --api-key sk-of-somebody"))
    assert found.command == launch(tq).command
    assert "sk-of-somebody" not in found.render()
    assert any("VLLM_API_KEY" in text for text in found.differences)


def test_a_tiny_model_changes_no_other_flags() -> None:
    tq = find("tq-chunked-prefill")
    found = launch(tq, "bigger-chunk").command
    arm = tq.arm("bigger-chunk")
    assert arm is not None
    changed = found.without("--load-format", "--host", "--port")
    assert replace(changed, env=()) == tq.command_of(arm).with_model(str(FOLDER))


def test_an_arm_may_size_its_flags_for_the_tiny_model() -> None:
    sco = find("sco-hybrid")
    assert cpu_bytes(launch(sco)) == 137438953472 // 11
    assert cpu_bytes(launch(sco, "small-cpu-pool")) == 7516192768 // 11
    assert any(
        " in place of --kv-transfer-config " in text
        for text in launch(sco, "small-cpu-pool").differences
    )
    arm = sco.arm("small-cpu-pool")
    assert arm is not None
    assert '"cpu_bytes_to_use":7516192768' in (
        sco.command_of(arm).get("--kv-transfer-config") or ""
    )


def test_the_leased_gpus_replace_the_reported_request() -> None:
    tq = find("tq-chunked-prefill")
    reported = replace(
        tq, command="docker run --gpus all reporter/vllm:mine --model Qwen/Qwen3.5-9B"
    )
    weights = ServedModel(name="m")
    for gpus, request in (
        ((), "all"),
        (("2",), "device=2"),
        (("nvidia.com/gpu=2",), "device=nvidia.com/gpu=2"),
    ):
        made = container_launch(
            reported,
            reported.arms[0],
            image="i",
            weights=weights,
            port=1,
            evidence=Evidence.GPU,
            gpus=gpus,
        )
        assert made.container is not None
        assert made.container.gpus == request
    process = process_launch(
        tq,
        tq.arms[0],
        vllm=("vllm",),
        env={},
        weights=weights,
        port=1,
        evidence=Evidence.GPU,
        gpus=("2", "3"),
    )
    assert process.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert process.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_a_container_gets_the_folder_and_no_hub() -> None:
    tq = find("tq-chunked-prefill")
    weights = ServedModel(name="made", path=FOLDER, dummy=True, tiny_model=tq.tiny_model)
    found = container_launch(
        tq,
        tq.arms[0],
        image="vllm/vllm-openai:v0.23.0",
        weights=weights,
        port=1,
        evidence=Evidence.GPU,
    )
    assert found.container is not None
    assert [mount.target for mount in found.container.mounts] == [CONTAINER_MODEL]
    assert (found.env["HF_HUB_OFFLINE"], found.command.model) == ("1", CONTAINER_MODEL)
    assert found.weights.startswith("dummy: 1 layer, ")
