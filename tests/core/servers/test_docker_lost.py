"""Docker server whose engine stops answering."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.core.servers.docker_helpers import IDLE, containers_of, running, until_logged
from tests.skipping import cannot_run
from vllm_repro.command.container import ContainerSpec, Mount
from vllm_repro.servers import docker as docker_server
from vllm_repro.servers.docker import DockerServer
from vllm_repro.servers.docker_engine import Engine, connect
from vllm_repro.servers.orphans import sweep

pytestmark = [
    pytest.mark.docker,
    pytest.mark.anyio,
    # The Docker SDK drops a socket that could not connect without closing it.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]


@pytest.fixture(autouse=True)
def _collect_dropped_sockets() -> Iterator[None]:
    """Collect dropped sockets while the warning filter holds."""
    yield
    gc.collect()


@pytest.fixture
def proxy(tmp_path: Path, docker_engine: Engine) -> Iterator[Proxy]:
    if not docker_engine.host.startswith("unix://"):
        cannot_run(f"the engine is at {docker_engine.host}, and the proxy is for unix sockets")
    proxy = Proxy(tmp_path / "engine.sock", docker_engine.host)
    yield proxy
    proxy.close()


async def test_an_engine_that_is_gone_says_nothing_about_the_server(
    proxy: Proxy,
    program: Callable[..., ContainerSpec],
    serve: Callable[..., DockerServer],
    docker_engine: Engine,
    run_id: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(docker_server, "_RETRY_S", 0.5)
    server = serve(program(IDLE), engine=lambda: connect({"DOCKER_HOST": proxy.host}))
    await server.start()
    await until_logged(server, "up")
    proxy.close()
    ended = await asyncio.wait_for(server.exited(), 30)
    with caplog.at_level(logging.WARNING):
        await server.stop()
    assert (ended.lost, ended.code) == (True, None)
    (left,) = containers_of(docker_engine, run_id)
    assert left["State"] == "running", "it lives on, whatever its output's end looked like"
    assert f"container {left['Id'][:12]} may be left for `vllm-repro clean`" in caplog.text
    (line,) = sweep()
    assert f"for the run {run_id}" in line
    assert containers_of(docker_engine, run_id) == []


COUNT = """
import pathlib, sys, time
for i in range(3000):
    print('line', i)
    print('error', i, file=sys.stderr)
    if i == 1000:
        while not pathlib.Path('/go/now').exists(): time.sleep(0.02)
"""


async def test_connections_that_are_cut_cost_no_line_of_the_log(
    proxy: Proxy,
    program: Callable[..., ContainerSpec],
    serve: Callable[..., DockerServer],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "go"
    folder.mkdir()
    mounts = (Mount(str(folder), "/go", readonly=True),)
    server = serve(
        program(COUNT, mounts=mounts), engine=lambda: connect({"DOCKER_HOST": proxy.host})
    )
    async with running(server):
        await until_logged(server, "line 1000\n")
        await until_logged(server, "error 1000\n")
        proxy.cut()
        await asyncio.sleep(0.3)
        (folder / "now").touch()
        ended = await asyncio.wait_for(server.exited(), 30)
    assert (ended.code, ended.lost) == (0, False)
    lines = server.log_path.read_text().splitlines()
    for name in ("line", "error"):
        assert [line for line in lines if line.startswith(name)] == [
            f"{name} {i}" for i in range(3000)
        ]
    assert len(lines) == 6000


class Proxy:
    """Proxy on a unix socket.

    cut: end all connections, as a restart of dockerd does. close: also refuse new ones.
    """

    def __init__(self, path: Path, engine: str) -> None:
        self.host = f"unix://{path}"
        self._engine = engine.removeprefix("unix://")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def cut(self) -> None:
        for end in self._open:
            with contextlib.suppress(OSError):  # the other side has closed it
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # never listened on
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in self._open:
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(self._engine)
            self._open += [near, far]
            for one, other in ((near, far), (far, near)):
                thread = threading.Thread(target=self._pass_on, args=(one, other), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the connection was cut
            while data := one.recv(65536):
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):  # the other side has closed it
                end.shutdown(socket.SHUT_RDWR)
