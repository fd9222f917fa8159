"""Starts real rehearsal servers on free loopback ports, and ends whatever a test left running."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.rehearsal.rehearsal_process import TINY, Running, Start


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
