"""One server of several processes: started together, seen at the first, ended whole."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import psutil
import pytest

from vllm_repro.errors import InfraError
from vllm_repro.evidence import Evidence
from vllm_repro.host.ports import free_port
from vllm_repro.servers.kinds import ServerKind
from vllm_repro.servers.process import ProcessServer
from vllm_repro.servers.ranked import RankedServer

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
WITH_CHILD = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"


def runs(pid: int) -> bool:
    """An orphan that is dead stays a zombie until somebody reaps it."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def server(tmp_path: Path, head: str, *others: str) -> RankedServer:
    def process(name: str, code: str) -> ProcessServer:
        argv = (sys.executable, "-c", code)
        kind, evidence = ServerKind.PROCESS, Evidence.CPU
        return ProcessServer(
            argv, port=free_port(), log=tmp_path / name, env={}, kind=kind, evidence=evidence, grace=2.0
        )

    followers = [process(f"reported-1.rank{rank}.log", code) for rank, code in enumerate(others, 1)]
    return RankedServer(process("reported-1.log", head), followers)


def test_all_are_started_named_and_ended(tmp_path: Path) -> None:
    async def run() -> tuple[list[int], list[bool]]:
        ranked = server(tmp_path, SLEEP, SLEEP, WITH_CHILD)
        facts = await ranked.start()
        assert [rank.rank for rank in facts.ranks] == [1, 2]
        assert [path.name for path in ranked.rank_logs] == ["reported-1.rank1.log", "reported-1.rank2.log"]
        while len(ranked.processes()) < 2:
            await asyncio.sleep(0.05)
        pids = [facts.pid or 0, *(rank.pid or 0 for rank in facts.ranks), *ranked.processes()]
        assert ranked.processes()[0] == facts.pid, "the API server's process comes first"
        await ranked.stop()
        await ranked.stop()
        return pids, [runs(pid) for pid in pids]

    pids, alive = asyncio.run(run())
    assert len(set(pids)) == 4
    assert not any(alive)


def test_the_end_of_another_node_is_told_with_its_rank(tmp_path: Path) -> None:
    async def run() -> tuple[int, int | None]:
        ranked = server(tmp_path, SLEEP, SLEEP, "raise SystemExit(3)")
        await ranked.start()
        try:
            rank, ended = await asyncio.wait_for(ranked.rank_exited(), 20)
            return rank, ended.code
        finally:
            await ranked.stop()

    assert asyncio.run(run()) == (2, 3)


def test_a_node_that_cannot_be_started_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> tuple[int, ...]:
        ranked = server(tmp_path, SLEEP, SLEEP)
        monkeypatch.setattr(ranked.followers[0], "argv", ("/does/not/exist",))
        with pytest.raises(InfraError, match="cannot start"):
            await ranked.start()
        return ranked.head.processes()

    assert asyncio.run(run()) == ()


def test_a_node_that_stays_when_the_first_is_gone_is_named(tmp_path: Path) -> None:
    async def run() -> tuple[tuple[int, ...], tuple[int, ...]]:
        ranked = server(tmp_path, "raise SystemExit(0)", "raise SystemExit(0)", SLEEP)
        await ranked.start()
        try:
            await asyncio.wait_for(ranked.exited(), 20)
            stayed = await ranked.outlasting(2.0)
            await ranked.stop()
            return stayed, await ranked.outlasting(2.0)
        finally:
            await ranked.stop()

    assert asyncio.run(run()) == ((2,), ())
