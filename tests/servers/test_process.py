"""Process server: which environment it gets, and what of it is reported."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from vllm_repro.evidence import Evidence
from vllm_repro.host.ports import free_port
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.process import ProcessServer


def test_the_callers_environment_does_not_take_the_assertions_out_and_is_told_where_vllm_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "FLEX_ATTENTION")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_REPRO_REPORTS", str(tmp_path))
    monkeypatch.setenv("VLLM_USE_V1", "0")
    code = "import json, os, sys; print(json.dumps([sys.flags.optimize, os.environ['VLLM_USE_V1']]))"
    server = ProcessServer(
        (sys.executable, "-c", code),
        port=free_port(),
        log=tmp_path / "log",
        env={"VLLM_USE_V1": "1"},
        kind=ServerKind.PROCESS,
        evidence=Evidence.CPU,
    )

    async def run() -> dict[str, str]:
        facts = await server.start()
        await server.exited()
        await server.stop()
        return dict(facts.env)

    given = asyncio.run(run())
    assert json.loads((tmp_path / "log").read_text(encoding="utf-8")) == [0, "1"]
    assert {"VLLM_ATTENTION_BACKEND": "FLEX_ATTENTION", "VLLM_USE_V1": "1"}.items() <= given.items()
    assert not {"VLLM_API_KEY", "VLLM_REPRO_REPORTS", "PYTHONOPTIMIZE"} & given.keys()
