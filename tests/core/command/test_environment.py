from __future__ import annotations

import pytest

from vllm_repro.command.environment import loading_flags, variable_mistakes
from vllm_repro.command.parse import parse


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LD_PRELOAD", "/tmp/x.so"),
        ("PATH", "/tmp"),
        ("PYTHONPATH", "."),
        ("PYTHONWARNINGS", "all:0:antigravity.x:0:0"),
        ("BROWSER", "/bin/sh -c 'id'"),
        ("BASH_ENV", "x"),
        ("VLLM_REPRO_CACHE", "1"),  # steers the harness
        ("VLLM_NCCL_SO_PATH", "x.so"),
        ("VLLM_LOGGING_CONFIG_PATH", "log.json"),
        ("CUDA_HOME", "cuda"),
        ("TORCHINDUCTOR_CACHE_DIR", "/tmp/x"),
        ("NCCL_TUNER_PLUGIN", "x"),
        ("VLLM_RPC_BASE", "../x"),
        ("HF_ENDPOINT", "https://hub.example"),
        ("RAY_ADDRESS", "192.0.2.1:6379"),
        ("RAY_RUNTIME_ENV_HOOK", "os.system"),
    ],
)
def test_a_variable_that_may_run_a_strangers_code_is_a_mistake(name: str, value: str) -> None:
    (mistake,) = variable_mistakes([("VLLM_USE_V1", "1"), (name, value)])
    assert mistake.startswith(f"{name} ")
    assert "remove it" in mistake


def test_switches_urls_and_secrets_are_allowed() -> None:
    command = parse(
        "export VLLM_LOGGING_LEVEL=DEBUG"
        " VLLM_USAGE_STATS_SERVER=https://stats.example\nHF_TOKEN=$HF_TOKEN"
        " CUDA_VISIBLE_DEVICES=0,1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True vllm serve m"
    )
    assert len(command.env) == 5
    assert variable_mistakes(command.env) == []


@pytest.mark.parametrize(
    "flag",
    [
        "--trust-remote-code",
        "--middleware evil.module",
        "--tool-parser-plugin evil.py",
        "--chat-template template.jinja",
        "--config=more.yaml",
        "--download-dir /etc/evil",
        "--ssl-keyfile ../key",
        "--lora-modules a=/srv/evil",
        """--kv-transfer-config '{"kv_connector_module_path": "evil"}'""",
    ],
)
def test_a_flag_that_loads_code_or_files_is_named(flag: str) -> None:
    command = parse(
        f"vllm serve org/model --max-model-len 8192 --dtype bfloat16 {flag} --served-model-name a/b"
    )
    (named,) = loading_flags(command.flags)
    assert named.split()[0].partition("=")[0] == flag.split()[0].partition("=")[0]
