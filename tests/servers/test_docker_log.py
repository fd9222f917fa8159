"""The log of a container, copied from an engine that sends only a part of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vllm_repro.command.container import ContainerSpec, Publish
from vllm_repro.evidence import Evidence
from vllm_repro.servers import docker as docker_server
from vllm_repro.servers.docker import DockerServer
from vllm_repro.servers.docker_engine import Engine

LOG = [b"first\n", b"second\n", b"last\n"]


def test_an_engine_that_stops_sending_costs_neither_the_exit_nor_the_end_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_server, "_LOG_END_S", 0.05)
    sent, released = threading.Event(), threading.Event()

    def logs(_: str, *, follow: bool, **__: object) -> Iterator[bytes]:
        yield from LOG[:1] if follow else LOG
        if follow:
            sent.set()
            released.wait(30)

    def inspect_container(_: str) -> dict[str, Any]:
        return {"State": {"Running": not sent.is_set(), "ExitCode": 3}}

    api = SimpleNamespace(logs=logs, inspect_container=inspect_container, wait=lambda *_, **__: sent.wait(30))
    engine = cast(Engine, SimpleNamespace(client=SimpleNamespace(api=api)))
    spec = ContainerSpec(image="i", publish=(Publish(8001),))
    server = DockerServer(spec, port=1, log=tmp_path / "log", run="r", evidence=Evidence.CPU)
    follower = threading.Thread(target=server._follow, args=(engine, "id"))
    follower.start()
    try:
        server._await_end(engine, "id", follower)
    finally:
        released.set()
        follower.join()
    assert server._exit is not None
    assert server._exit.code == 3
    assert (tmp_path / "log").read_bytes() == b"".join(LOG)
