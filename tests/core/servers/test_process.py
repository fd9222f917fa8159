"""Process server: which environment it gets, and what of it is reported."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import psutil
import pytest

from tests.core.servers.docker_helpers import running
from vllm_repro.errors import UsageError
from vllm_repro.host.ports import free_port
from vllm_repro.releases.operators import Fit, Misfit
from vllm_repro.releases.provision import Release
from vllm_repro.releases.sources import Source
from vllm_repro.running.job import refuse_unused_options
from vllm_repro.scenario.catalogue import find
from vllm_repro.servers import process as module
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.launch import ServedModel, process_launch
from vllm_repro.servers.options import ServerOptions
from vllm_repro.servers.process import ProcessServer, misfit, with_release
from vllm_repro.servers.site import choose
from vllm_repro_diagnosis.evidence import Evidence


def server_of(program: str, log: Path, **env: str) -> ProcessServer:
    return ProcessServer(
        (sys.executable, "-c", program),
        port=free_port(),
        log=log,
        env=env,
        kind=ServerKind.PROCESS,
        evidence=Evidence.CPU,
    )


@pytest.mark.anyio
async def test_the_environment_keeps_assertions_and_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLEX_ATTENTION")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_REPRO_REPORTS", str(tmp_path))
    monkeypatch.setenv("VLLM_USE_V1", "0")
    code = (
        "import json, os, sys; print(json.dumps([sys.flags.optimize, os.environ['VLLM_USE_V1']]))"
    )
    server = server_of(code, tmp_path / "log", VLLM_USE_V1="1")
    async with running(server) as facts:
        await server.exited()
    assert json.loads((tmp_path / "log").read_text(encoding="utf-8")) == [0, "1"]
    kept = {"VLLM_ATTENTION_BACKEND": "FLEX_ATTENTION", "VLLM_USE_V1": "1"}
    assert facts.env.items() >= kept.items()
    assert not {"VLLM_API_KEY", "VLLM_REPRO_REPORTS", "PYTHONOPTIMIZE"} & facts.env.keys()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("ends", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9)], ids=["exits", "killed"]
)
async def test_the_pid_of_an_ended_server_is_kept_for_its_session(
    ends: str, code: int, tmp_path: Path
) -> None:
    server = server_of(f"import os, sys; {ends}", tmp_path / "log")
    async with running(server) as facts:
        ended = await server.exited()
        assert (ended.code, psutil.pid_exists(facts.pid or 0)) == (code, True)
    assert not psutil.pid_exists(facts.pid or 0)


SOURCE = Source(folder=Path("/src/vllm"), commit="abc")
NO_BUILD = Source(release="0.33.0")


def release(folder: Path, *operators: str, source: Source = NO_BUILD) -> Release:
    """Return a release over the compiled parts of 0.32.0, which lack these operators."""
    misfits = tuple(
        Misfit(operator=name, where="_custom_ops.py:1", given=3, takes=2) for name in operators
    )
    return Release(
        version="0.33.0",
        torch="2.13.0",
        python=folder,
        packages=folder,
        executable=folder / "vllm",
        source=source,
        compiled="0.32.0",
        fit=Fit(fits=54, misfits=misfits),
    )


@pytest.mark.parametrize(
    ("operator", "attention", "flags", "unsupported"),
    [
        ("cpu_attention_with_kv_cache", True, "", True),
        ("cpu_attention_with_kv_cache", False, "", False),  # the lab replaces it
        ("get_scheduler_metadata", True, "", True),
        ("weight_packed_linear", True, "amx_tile", True),
        ("weight_packed_linear", True, "avx512f", False),
        ("fused_experts_cpu", True, "", False),  # the model has no experts
        ("cpu_gemm_wna16", True, "", False),
    ],
)
def test_only_an_operator_that_the_model_calls_is_unsupported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operator: str,
    attention: bool,
    flags: str,
    unsupported: bool,
) -> None:
    monkeypatch.setattr(module, "cpu_flags", lambda: frozenset(flags.split()))
    why = misfit(
        release(tmp_path, operator), find("min-tokens-stop-ids").tiny_model, attention=attention
    )
    assert bool(why) is unsupported
    if unsupported:
        assert "the compiled parts of 0.32.0 do not fit the Python of 0.33.0" in why
        assert operator in why


def test_the_served_model_decides_and_not_the_reported_one(tmp_path: Path) -> None:
    """Report sco-hybrid with a model of experts; its tiny model in the lab has none."""
    scenario = find("sco-hybrid")
    assert scenario.lab is not None
    over = release(tmp_path, "fused_experts_cpu")
    assert misfit(over, scenario.tiny_model)
    assert misfit(over, scenario.lab.shape(scenario.model)) == ""


@pytest.mark.parametrize(
    "command",
    [
        "docker run --gpus all vllm/vllm-openai:v0.33.0 --model m --max-model-len 9",
        "docker run vllm/vllm-openai:v0.33.0 m --max-model-len 9",
        "vllm serve --model m -tp 2",
        "vllm serve -tp 2 --model=m --trust-remote-code",
        "vllm serve m --compilation-config '{\"a\": 1}'",
        "python -m vllm.entrypoints.openai.api_server --model m --dtype auto",
    ],
)
def test_each_line_of_a_shown_command_is_a_flag_with_its_value(command: str) -> None:
    scenario = dataclasses.replace(find("min-tokens-stop-ids"), command=command)
    launch = process_launch(
        scenario,
        scenario.arms[0],
        vllm=("vllm",),
        env={},
        weights=ServedModel(name="m"),
        port=8000,
        evidence=Evidence.GPU,
    )
    first, *lines = launch.render().split(" \\\n")
    assert first in ("vllm serve", "vllm serve m")
    assert [line for line in lines if not line.startswith("  -")] == []
    assert (first == "vllm serve m") is not any("--model" in line for line in lines)


def test_a_report_names_the_compiled_parts_of_a_tree(tmp_path: Path) -> None:
    scenario = find("min-tokens-stop-ids")
    launch = process_launch(
        scenario,
        scenario.arms[0],
        vllm=("vllm",),
        env={},
        weights=ServedModel(name="m"),
        port=8000,
        evidence=Evidence.CPU,
    )

    assert with_release(launch, None) is launch
    over = "over the compiled parts of 0.32.0"
    for installed, source, words in (
        (
            release(tmp_path, "fused_experts_cpu"),
            None,
            f"vLLM 0.33.0, which has no CPU build, {over}: 54 of 55 calls",
        ),
        (
            release(tmp_path, source=SOURCE),
            "/src/vllm@abc",
            f"the Python of /src/vllm@abc, {over}: 54 of 54 calls",
        ),
    ):
        made = with_release(launch, installed)
        assert (made.source, made.compiled) == (source, "0.32.0")
        assert words in "\n".join(made.differences)


@pytest.mark.parametrize("kind", list(ServerKind))
def test_a_vllm_that_is_no_release_runs_as_a_process_alone(kind: ServerKind) -> None:
    options = ServerOptions(vllm=SOURCE)
    if kind in (ServerKind.PROCESS, ServerKind.LAB, ServerKind.SCHEDULER):
        refuse_unused_options(options, kind)
    else:
        with pytest.raises(UsageError, match="runs releases only") as caught:
            refuse_unused_options(options, kind)
        assert "--server process or lab or scheduler" in (caught.value.hint or "")


def test_auto_takes_no_kind_that_cannot_run_a_source() -> None:
    options = ServerOptions(vllm=SOURCE)
    assert choose(find("tq-chunked-prefill"), options).kind is ServerKind.LAB
    assert choose(find("min-tokens-stop-ids"), options).kind is ServerKind.PROCESS
