"""NIXL's worker half of the lab: which blocks are copied, which requests are released, and what a failure names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_repro_lab import nixl


class FullAttentionSpec: ...


class SlidingWindowSpec: ...


def worker_of(*specs: type) -> nixl.Worker:
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False)
    )
    groups = [SimpleNamespace(kv_cache_spec=spec(), layer_names=["layer"]) for spec in specs]
    return nixl.Worker(config, "here", SimpleNamespace(kv_cache_groups=groups, num_blocks=9))


def asked(engine: str, *local: list[int], awaiting: bool = False) -> Any:
    remote = SimpleNamespace(
        engine_id=engine, request_id="prefill", block_ids=[[4, 5, 6]] * len(local)
    )
    return SimpleNamespace(local_block_ids=local, remote=remote, awaiting_kvs=awaiting)


def step(worker: nixl.Worker, *, fetched: Any = None, held: str = "") -> tuple[set[str], set[str]]:
    loads = {} if fetched is None else {"r1": fetched}
    worker.start_load_kv(
        SimpleNamespace(reqs_to_recv=loads, reqs_to_send={held: 1.0} if held else {})
    )
    return worker.get_finished()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "FETCH_S", 0)


def test_the_last_remote_blocks_are_copied_to_the_local_ones() -> None:
    assert nixl.pairs_of(asked("here", [1, 2], [3])) == [[(1, 5), (2, 6)], [(3, 6)]]


def test_a_prefill_is_held_until_it_was_fetched() -> None:
    worker = worker_of(FullAttentionSpec)
    assert step(worker, held="prefill") == (set(), set())
    assert step(worker, fetched=asked("here", [1])) == ({"prefill"}, {"r1"})
    assert step(worker) == (set(), set())


@pytest.mark.parametrize(
    ("specs", "invalid"),
    [((FullAttentionSpec,), {1, 2}), ((FullAttentionSpec, SlidingWindowSpec), set())],
)
def test_a_failure_names_blocks_unless_the_model_is_hybrid(
    specs: tuple[type, ...], invalid: set[int]
) -> None:
    worker = worker_of(*specs)
    _, ended = step(worker, fetched=asked("gone", *([1, 2] for _ in specs)))
    assert ended == {"r1"}
    assert [worker.get_block_ids_with_load_errors() for _ in range(2)] == [invalid, set()]


def test_a_whole_hit_is_reported_only_if_the_scheduler_waits() -> None:
    worker = worker_of(FullAttentionSpec)
    assert step(worker, fetched=asked("here", [])) == (set(), set())
    assert step(worker, fetched=asked("here", [], awaiting=True)) == (set(), {"r1"})


def test_a_fetch_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "FETCH_S", 60)
    assert step(worker_of(FullAttentionSpec), fetched=asked("here", [1])) == (set(), set())
