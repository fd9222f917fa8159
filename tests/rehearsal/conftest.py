"""Starts real rehearsal servers on free loopback ports, and ends whatever a test left running."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

# the engine's modules are imported as a package where a test looks at one alone, and the helpers by their full name
sys.path[:0] = [str(ROOT), str(ROOT / "fixtures")]

from tests.rehearsal.rehearsal_process import TINY, Running, Start  # noqa: E402  # found by the path set above


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a server: `start("0.23.0", *flags, shape=…, fault=…, env=…)`; it is ended after the test."""
    running: list[Running] = []

    def begin(
        version: str,
        *flags: str,
        shape: Mapping[str, Any] | None = TINY,
        fault: str | None = None,
        executor: str = "uni",
        model: str | None = "tiny/model",
        env: Mapping[str, str] | None = None,
    ) -> Running:
        told = {"VLLM_REHEARSAL_VERSION": version, "VLLM_REHEARSAL_EXECUTOR": executor, **(env or {})}
        if shape is not None:
            told["VLLM_REHEARSAL_SHAPE"] = json.dumps(shape)
        if fault is not None:
            told["VLLM_REHEARSAL_FAULT"] = fault
        argv = ["serve", *([model] if model else []), *flags]
        server = Running(argv, told, tmp_path / f"server-{len(running)}.log")
        running.append(server)
        return server

    yield begin
    for server in running:
        server.end()
