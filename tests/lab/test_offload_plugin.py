"""The mechanism `offload` with stubs of vLLM: replaced names, logged observations, and tracebacks without lab frames."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_repro_diagnosis.boot_facts import Observation, observed
from vllm_repro_diagnosis.log_text import read_lines

PLUGIN = "vllm_repro_lab.offload"


class Link:
    """Block in the free list."""

    next_free_block: Link | None = None


class BlockPool:
    """The parts of vLLM's class that the plugin uses."""

    def __init__(self, counter: int, real: int) -> None:
        head, tail = Link(), Link()
        last = head
        for _ in range(real):
            last.next_free_block = Link()
            last = last.next_free_block
        last.next_free_block = tail
        self.counter = counter
        self.free_block_queue = SimpleNamespace(fake_free_list_head=head, fake_free_list_tail=tail)

    def get_num_free_blocks(self) -> int:
        return self.counter

    def get_new_blocks(self, num_blocks: int) -> None:
        if num_blocks > self.get_num_free_blocks():
            raise ValueError("Cannot get free blocks")
        self.popleft_n(num_blocks)

    def popleft_n(self, n: int) -> None:
        link: Link | None = self.free_block_queue.fake_free_list_head.next_free_block
        for _ in range(n):
            assert link is not None
            link = link.next_free_block


class Log(list[str]):
    def info(self, text: str, *values: object) -> None:
        self.append(text % values)

    @property
    def observed(self) -> tuple[Observation, ...]:
        return observed(
            read_lines(
                "\n".join(f"(Worker pid=1) INFO 11-21 20:43:24 [o.py:1] {line}" for line in self)
            )
        )


class Rows(dict[int, bytes]):
    """Rows with a tensor's indexing by a list."""

    # a tensor takes a list
    def __getitem__(self, places: Sequence[int]) -> list[bytes]:  # type: ignore[override]
        return [super(Rows, self).__getitem__(place) for place in places]

    # likewise
    def __setitem__(self, places: Sequence[int], rows: Sequence[bytes]) -> None:  # type: ignore[override]
        for place, row in zip(places, rows, strict=True):
            super().__setitem__(place, row)


Installed = tuple[Any, ModuleType, Log, type[BlockPool]]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Installed]:
    def installed(**names: object) -> Installed:
        class Pool(BlockPool):
            get_num_free_blocks = BlockPool.get_num_free_blocks

        log = Log()
        worker = ModuleType("vllm.v1.simple_kv_offload.worker")
        torch = SimpleNamespace(
            cuda=SimpleNamespace(Stream="CUDA's", other="torch's"), zeros="torch's", Event="CUDA's"
        )
        vars(worker).update({"DmaCopyBackend": None, "torch": torch, **names})
        modules = {
            "torch": torch,
            "vllm": ModuleType("vllm"),
            "vllm.v1": ModuleType("vllm.v1"),
            "vllm.v1.core": ModuleType("vllm.v1.core"),
            "vllm.v1.core.block_pool": SimpleNamespace(BlockPool=Pool),
            "vllm.v1.simple_kv_offload": SimpleNamespace(worker=worker),
            "vllm.v1.simple_kv_offload.worker": worker,
        }
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr("vllm_repro_lab.record._logger", log)
        monkeypatch.delitem(sys.modules, PLUGIN, raising=False)
        plugin = importlib.import_module(PLUGIN)
        plugin.install()
        sys.modules.pop(PLUGIN)
        return plugin, worker, log, Pool

    return installed


def test_only_cuda_names_are_replaced_and_only_in_that_module(
    install: Callable[..., Installed],
) -> None:
    plugin, worker, _, _ = install(is_pin_memory_available=lambda: True)
    assert worker.DmaCopyBackend is plugin.CopyBackend
    assert worker.is_pin_memory_available() is False
    assert not hasattr(worker, "PIN_MEMORY")
    assert (worker.torch.zeros, worker.torch.cuda.other) == ("torch's", "torch's")
    low, _high = worker.torch.cuda.Stream.priority_range()
    worker.torch.Event().record(worker.torch.cuda.current_stream())
    assert worker.torch.cuda.Stream(priority=low) is not None
    assert sys.modules["torch"].cuda.Stream == "CUDA's"


def test_a_release_that_pins_by_a_constant(install: Callable[..., Installed]) -> None:
    _, worker, _, _ = install(PIN_MEMORY=True)
    assert worker.PIN_MEMORY is False
    assert not hasattr(worker, "is_pin_memory_available")


def test_copies_are_immediate_and_a_store_completes_one_step_later(
    install: Callable[..., Installed],
) -> None:
    plugin, _, log, _ = install(PIN_MEMORY=True)
    gpu, cpu = (
        {"kv": Rows({n: b"g%d" % n for n in range(5)})},
        {"kv": Rows(dict.fromkeys(range(5), b"c"))},
    )
    backend = plugin.CopyBackend()
    backend.init(gpu, cpu, None, None, None)
    stores: list[tuple[int, Any]] = []
    loads: list[tuple[int, Any]] = []
    backend.launch_copy(
        [3, 1, 3], [0, 1, 2], is_store=True, event_idx=7, events_list=stores, wait_event=object()
    )
    assert cpu["kv"][[0, 1, 2, 3]] == [b"g3", b"g1", b"g3", b"c"]
    backend.launch_copy([2], [4], is_store=False, event_idx=8, events_list=loads)
    assert gpu["kv"][[4]] == [b"g3"]
    (index, store), (_, load) = stores[0], loads[0]
    assert (index, store.query(), store.query(), load.query()) == (7, False, True, True)
    assert log.observed == (
        Observation("store", {"event": 7, "blocks": 3, "distinct": 2, "twice": [3]}),
    )


def test_synchronize_completes_a_store(install: Callable[..., Installed]) -> None:
    plugin, _, _, _ = install(PIN_MEMORY=True)
    event = plugin.Event(polls=1)
    event.synchronize()
    assert event.query()


def test_not_more_than_32_blocks_are_named(install: Callable[..., Installed]) -> None:
    plugin, _, log, _ = install(PIN_MEMORY=True)
    plugin._observe_store(0, [*range(100), *range(50)])
    (seen,) = log.observed
    assert (seen.values["blocks"], seen.values["distinct"], seen.values["twice"]) == (
        150,
        100,
        list(range(32)),
    )


def test_a_short_free_list_is_logged_and_the_traceback_has_no_lab_frame(
    install: Callable[..., Installed],
) -> None:
    _, _, log, pool = install(PIN_MEMORY=True)
    with pytest.raises(AssertionError) as death:
        pool(counter=106, real=34).get_new_blocks(50)
    assert log.observed == (Observation("free_list", {"counter": 106, "walked": 34, "asked": 50}),)
    frames = [frame.name for frame in traceback.extract_tb(death.value.__traceback__)]
    assert frames[1:] == ["get_new_blocks", "popleft_n"]


def test_a_long_enough_free_list_is_not_logged(install: Callable[..., Installed]) -> None:
    _, _, log, pool = install(PIN_MEMORY=True)
    right = pool(counter=34, real=34)
    right.get_new_blocks(34)
    assert right.get_num_free_blocks() == 34
    assert pool(counter=106, real=34).get_num_free_blocks() == 106
    with pytest.raises(ValueError, match="Cannot get"):
        right.get_new_blocks(35)
    assert not log
