"""A server's further nodes on other nodes of a cluster.

A fake stands in for Ray; tests/live/test_ray_hosts.py has the real one.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cluster.test_fleet import FakeRay, RayError, RayTaskError, Task, job_in
from vllm_repro.errors import InfraError
from vllm_repro_cluster.item import ERROR, EXIT, NODE, OUTPUT, RANK_LOG, STARTED, Chunk, Item, Rank
from vllm_repro_cluster.ranks import ClusterNodes, _Node

FACTS = {
    "kind": "rehearsal",
    "evidence": "rehearsal",
    "argv": ["vllm", "serve"],
    "env": {"A": "1"},
    "pid": 7,
}
BEGIN: list[Chunk] = [
    (NODE, 0, b"10.0.0.3"),
    (OUTPUT, 0, b"installing\n"),
    (STARTED, 0, json.dumps(FACTS).encode()),
]
END: Chunk = (EXIT, 0, b'{"code": 3, "detail": "it is gone"}')


def yielding(*chunks: Chunk, then: Exception | None = None) -> Task:
    """Return a task that yields `chunks` and then fails."""

    def task(_: Item, __: Mapping[str, bytes]) -> Iterator[Chunk]:
        yield from chunks
        if then:
            raise then

    return task


def node(tmp_path: Path, *chunks: Chunk, lost: str = "") -> tuple[_Node, list[str]]:
    """Return a node that yields `chunks`, and the lines that it shows.

    lost: why Ray loses it then.
    """

    task = yielding(*chunks, then=RayError(lost) if lost else None)
    shown: list[str] = []
    item = Item(job=job_in(tmp_path), resume="", diffs=(), folder=str(tmp_path))
    return _Node(FakeRay(task), item, Rank(rank=1), tmp_path / "rank1.log", shown.append), shown


def test_facts_log_and_end_come_from_the_node(tmp_path: Path) -> None:
    log: list[Chunk] = [(RANK_LOG, 0, b"one\n"), (RANK_LOG, 4, b"two\n")]
    second, shown = node(tmp_path, *BEGIN, *log, END)
    facts = asyncio.run(second.start())
    assert (facts.argv, facts.env, facts.pid) == (("vllm", "serve"), {"A": "1"}, 7)
    ended = asyncio.run(second.exited())
    assert (ended.code, ended.detail, ended.lost) == (3, "it is gone", False)
    assert (tmp_path / "rank1.log").read_bytes() == b"one\ntwo\n"
    assert shown == ["10.0.0.3: installing"]
    asyncio.run(second.stop())


def test_a_node_that_cannot_start_it_raises_why(tmp_path: Path) -> None:
    error = {"type": "InfraError", "message": "no room on the disk", "hint": "free some"}
    second, _ = node(tmp_path, BEGIN[0], (ERROR, 0, json.dumps(error).encode()))
    with pytest.raises(InfraError, match=r"^10\.0\.0\.3: no room on the disk") as caught:
        asyncio.run(second.start())
    assert caught.value.hint == "free some"


@pytest.mark.parametrize(
    ("lost", "detail"),
    [
        ("the worker died. More", "its node 10.0.0.3 was lost: the worker died"),
        ("", "its process ended early"),
    ],
)
def test_a_lost_node_is_no_exit_of_the_server(tmp_path: Path, lost: str, detail: str) -> None:
    second, _ = node(tmp_path, *BEGIN, lost=lost)
    asyncio.run(second.start())
    ended = asyncio.run(second.exited())
    assert (ended.code, ended.detail, ended.lost) == (None, detail, True)


def test_a_node_lost_before_its_start_is_infra(tmp_path: Path) -> None:
    second, _ = node(tmp_path, BEGIN[0], lost="gone")
    with pytest.raises(InfraError, match=r"^rank 1: its node 10\.0\.0\.3 was lost: gone$"):
        asyncio.run(second.start())


def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, task: Task) -> ClusterNodes:
    monkeypatch.setattr("vllm_repro_cluster.ranks.ray_at", lambda *_: FakeRay(task))
    item = Item(
        job=job_in(tmp_path), resume="", diffs=(), folder=str(tmp_path), nodes=2, address="10.0.0.2"
    )
    return ClusterNodes(item, lambda _: None)


def test_nodes_are_prepared_and_their_addresses_known(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    task = yielding(BEGIN[0], (EXIT, 0, b'{"code": 0, "detail": "it is prepared"}'))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert cluster(monkeypatch, tmp_path, task).prepare() == ["10.0.0.3"]
    assert "RAY_AUTH_TOKEN" not in os.environ  # servers inherit the rest


def test_a_node_without_the_package_is_trouble_before_any_boot(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = RayTaskError(ModuleNotFoundError("No module named 'vllm_repro'"))
    with pytest.raises(
        InfraError, match=r"^rank 1: it could not be started on its node: ModuleNotFoundError"
    ):
        cluster(monkeypatch, tmp_path, yielding(BEGIN[0], then=missing)).prepare()


def test_a_node_that_never_answers_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def task(_: Item, __: Mapping[str, bytes]) -> Iterator[Chunk]:
        time.sleep(1.0)
        yield from ()

    monkeypatch.setattr("vllm_repro_cluster.ranks._BEGINS_IN_S", 0.1)
    with pytest.raises(InfraError, match="no node of the cluster took rank 1 within 0 s"):
        cluster(monkeypatch, tmp_path, task).prepare()


def test_a_server_whose_log_cannot_be_written_here_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    second, _ = node(tmp_path, *BEGIN)
    monkeypatch.setattr(second, "_take", full)
    with pytest.raises(InfraError, match="its log cannot be written: No space left on device"):
        asyncio.run(second.start())
    assert second._ray.cancelled == 1
