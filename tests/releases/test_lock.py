"""One install at a time: the second waits and says for what, and a killed one is not waited for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from tests.releases.fake_installer import FakeInstaller, silent
from vllm_repro.releases.cachefiles import locked
from vllm_repro.releases.pip_install import Progress
from vllm_repro.releases.provision import ReleaseCache

_PATIENCE_S = 60
"""Long enough for the slowest machine: nothing waits for it but a failure."""


def test_two_runs_at_once_install_once_and_the_second_says_why_it_waits(
    tmp_path: Path, installer: FakeInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    download = installer.download_wheel
    waiting: list[str] = []
    holds, waits = threading.Event(), threading.Event()

    def download_when_the_other_waits(version: str, folder: Path, progress: Progress) -> Path:
        holds.set()  # only now, with the lock held and its holder written there, may the other come
        assert waits.wait(_PATIENCE_S)
        return download(version, folder, progress)

    def hear(line: str) -> None:
        if line.startswith("waiting"):
            waiting.append(line)
            waits.set()

    monkeypatch.setattr(installer, "download_wheel", download_when_the_other_waits)
    caches = [ReleaseCache(tmp_path, installer=installer, free_bytes=lambda _: 10**12) for _ in range(2)]
    with ThreadPoolExecutor() as runs:
        first = runs.submit(caches[0].provision, "0.28.0", hear)
        assert holds.wait(_PATIENCE_S)
        second = runs.submit(caches[1].provision, "0.28.0", hear)
    assert first.result() == second.result()
    assert installer.calls == ["download", "base", "environment", "unpack"]
    assert waiting == [f"waiting for another run: installing vLLM 0.28.0 (pid {os.getpid()})"]


def hold(root: Path, held: Event) -> None:
    with locked(root, "installing vLLM 0.28.0", silent):
        held.set()
        signal.pause()


def test_the_lock_of_a_killed_run_is_free(cache: ReleaseCache) -> None:
    spawn = multiprocessing.get_context("spawn")
    held = spawn.Event()
    holder = spawn.Process(target=hold, args=(cache.root, held))
    holder.start()
    try:
        assert held.wait(_PATIENCE_S)
        said: list[str] = []

        def hear(line: str) -> None:
            said.append(line)
            if line.startswith("waiting"):
                holder.kill()

        cache.provision("0.28.0", hear)
        assert said[0] == f"waiting for another run: installing vLLM 0.28.0 (pid {holder.pid})"
    finally:
        holder.kill()
        holder.join()
        holder.close()
