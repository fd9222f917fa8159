"""What is run for a reported command, and the reported differences."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.scenario_texts import arm_of
from vllm_repro.command.container import ContainerSpec
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
ON_GPU: dict[str, Any] = {"port": 1, "evidence": Evidence.GPU}


def made(scenario: Scenario) -> ServedModel:
    return ServedModel(name="made", path=FOLDER, dummy=True, tiny_model=scenario.tiny_model)


def container_of(launch: Launch) -> ContainerSpec:
    assert launch.container is not None
    return launch.container


def launch(scenario: Scenario, name: str = "reported") -> Launch:
    arm = arm_of(scenario, name)
    return process_launch(scenario, arm, vllm=("vllm",), env={}, weights=made(scenario), **ON_GPU)


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
    changed = launch(tq, "bigger-chunk").command.without("--load-format", "--host", "--port")
    command = tq.command_of(arm_of(tq, "bigger-chunk")).with_model(str(FOLDER))
    assert replace(changed, env=()) == command


def test_an_arm_may_size_its_flags_for_the_tiny_model() -> None:
    sco = find("sco-hybrid")
    assert cpu_bytes(launch(sco)) == 137438953472 // 11
    assert cpu_bytes(launch(sco, "small-cpu-pool")) == 7516192768 // 11
    assert any(
        " in place of --kv-transfer-config " in text
        for text in launch(sco, "small-cpu-pool").differences
    )
    reported = sco.command_of(arm_of(sco, "small-cpu-pool")).get("--kv-transfer-config")
    assert '"cpu_bytes_to_use":7516192768' in (reported or "")


@pytest.mark.parametrize(
    ("gpus", "request_"),
    [((), "all"), (("2",), "device=2"), (("nvidia.com/gpu=2",), "device=nvidia.com/gpu=2")],
)
def test_the_leased_gpus_replace_the_reported_request(gpus: tuple[str, ...], request_: str) -> None:
    command = "docker run --gpus all reporter/vllm:mine --model Qwen/Qwen3.5-9B"
    reported = replace(find("tq-chunked-prefill"), command=command)
    served: dict[str, Any] = {"weights": ServedModel(name="m"), **ON_GPU}
    found = container_launch(reported, reported.arms[0], image="i", gpus=gpus, **served)
    assert container_of(found).gpus == request_


def test_a_process_gets_its_leased_gpus() -> None:
    tq, served = find("tq-chunked-prefill"), {"weights": ServedModel(name="m"), **ON_GPU}
    found = process_launch(tq, tq.arms[0], vllm=("vllm",), env={}, gpus=("2", "3"), **served)
    visible = {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert found.env.items() >= visible.items()


def test_a_container_gets_the_folder_and_no_hub() -> None:
    tq, image = find("tq-chunked-prefill"), "vllm/vllm-openai:v0.23.0"
    found = container_launch(tq, tq.arms[0], image=image, weights=made(tq), **ON_GPU)
    assert [mount.target for mount in container_of(found).mounts] == [CONTAINER_MODEL]
    assert (found.env["HF_HUB_OFFLINE"], found.command.model) == ("1", CONTAINER_MODEL)
    assert found.weights.startswith("dummy: 1 layer, ")
