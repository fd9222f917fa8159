"""Presets of the vocabulary, compared with the longer form that each stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vllm_repro.scenario.reader import read
from vllm_repro.vocabulary import *

ROOM = '"kv_connector_extra_config":{"cpu_bytes_to_use":7,"store_polls":2}'
OFFLOADING = f'{{"kv_connector":"OffloadingConnector","kv_role":"kv_both",{ROOM}}}'
MODULE = '"kv_connector_module_path":"vllm_repro_lab.late_connector"'
POLICY = '"kv_load_failure_policy":"recompute"'
LATE = f'"kv_connector":"LateConnector",{MODULE},"kv_role":"kv_both"'


@pytest.mark.parametrize(
    ("preset", "written_out"),
    [
        (offloading(7, store_polls=2), f"--kv-transfer-config '{OFFLOADING}'"),
        (late_connector(), f"--kv-transfer-config '{{{LATE}}}'"),
        (
            late_connector(rejects=True),
            f"--kv-transfer-config '{{{LATE},{POLICY}}}'",
        ),
        (
            assertion("n > 0", frames=["step", "schedule"]),
            signature(
                phase="request",
                exception="AssertionError",
                message="",
                source="n > 0",
                frames=["step", "schedule"],
            ),
        ),
        (
            scheduler_lab(with_flags("--block-size 16"), layers=["full", "sliding"], window=64),
            Lab(
                mechanism="scheduler",
                layers=["full", "sliding"],
                window=64,
                why="the scheduler does not use weights",
                changes=(
                    with_flags("--enforce-eager", why="no compiler is needed"),
                    with_flags("--block-size 16"),
                ),
            ),
        ),
        (
            public_model("Qwen/Qwen3-8B", block_size=32, tiny_will_do=True, why="any"),
            Model(
                "Qwen/Qwen3-8B",
                heads=32,
                kv_heads=8,
                head_dim=128,
                layers=36,
                vocab_size=151936,
                block_size=32,
                max_position=40960,
                tiny_will_do=True,
                why="any",
            ),
        ),
    ],
)
def test_a_preset_is_its_longer_form(preset: Any, written_out: Any) -> None:
    assert preset == written_out


def test_a_model_without_a_kept_shape_is_a_mistake() -> None:
    text = (
        '"""A bug."""\nfrom vllm_repro.vocabulary import *\nscenario ='
        ' public_model("nobody/model")\n'
    )
    _, (problem, *_) = read(Path("x.py"), text)
    assert "the shape of 'nobody/model' is not kept, only of Qwen/Qwen3-0.6B" in problem.text
