"""Starts fault servers on free ports, and ends what a test left running."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.rehearsal.rehearsal_process import SMALL, Running, Start, free_port


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a server: `start("0.23.0", *flags, fault=…, env=…, port=…)`.

    It is ended after the test.
    """
    running: list[Running] = []

    def begin(
        version: str,
        *flags: str,
        fault: str = "",
        env: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> Running:
        given = {"VLLM_REHEARSAL_VERSION": version, "VLLM_REHEARSAL_FAULT": fault, **(env or {})}
        log = tmp_path / f"server-{len(running)}.log"
        server = Running(
            ["serve", "tiny/model", *(flags or SMALL)], given, log, port or free_port()
        )
        running.append(server)
        return server

    yield begin
    for server in running:
        server.end()
