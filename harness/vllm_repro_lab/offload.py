"""vLLM's simple CPU offload connector on its CPU platform.

`parts_connectors` lists each replaced name with its reason.

Only the worker half, which copies blocks, is replaced. The scheduler half, which chooses and frees
blocks, is vLLM's own. The lab also logs the blocks of each store, and a free list that is too
short.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import vllm.v1.simple_kv_offload.worker as worker
from vllm.v1.core.block_pool import BlockPool

from .event import Event
from .no_cuda import without_cuda
from .record import observe

_MOST_NAMED = 32


def install() -> None:
    """Replace how vLLM's simple CPU offload connector copies blocks, and watch the free list."""
    replaced: Any = worker
    replaced.DmaCopyBackend = CopyBackend
    without_cuda(replaced)
    _watch_free_list()


class CopyBackend:
    """Copy backend without DMA: copies the listed blocks at once.

    A store completes one step after the step that started it, a load in the same step.
    """

    _gpu: dict[str, Any] = {}  # noqa: RUF012  # empty without a model, where nothing calls `init`
    _cpu = _gpu

    def init(
        self, gpu_caches: Any, cpu_caches: Any, device: Any, load_stream: Any, store_stream: Any
    ) -> None:
        """Keep the KV caches of both sides, by layer."""
        self._gpu, self._cpu = gpu_caches, cpu_caches

    def launch_copy(
        self,
        src_blocks: Sequence[int],
        dst_blocks: Sequence[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Any]],
        wait_event: Any = None,
    ) -> None:
        """Copy blocks to the CPU (a store) or back (a load) now, and append the copy's event."""
        source, target = (self._gpu, self._cpu) if is_store else (self._cpu, self._gpu)
        for name in source:
            target[name][dst_blocks] = source[name][src_blocks]
        if is_store:
            _observe_store(event_idx, src_blocks)
        events_list.append((event_idx, Event(polls=1 if is_store else 0)))

    def shutdown(self) -> None:
        """Do nothing: there is no thread to end."""


def _observe_store(event: int, blocks: Sequence[int]) -> None:
    """Log the blocks of a store: how many, how many distinct, and which occur twice."""
    counts = Counter(blocks)
    twice = sorted(block for block, count in counts.items() if count > 1)
    observe(
        "store", event=event, blocks=len(blocks), distinct=len(counts), twice=twice[:_MOST_NAMED]
    )


def _watch_free_list() -> None:
    """Replace a method of BlockPool: log a free list that has too few blocks for what is taken.

    It logs only if the counter says that there are enough, and before vLLM takes the blocks, so no
    lab frame is in a traceback.
    """
    original = BlockPool.get_num_free_blocks

    def get_num_free_blocks(self: Any) -> int:
        counter: int = original(self)
        caller = sys._getframe(1)
        if caller.f_code is BlockPool.get_new_blocks.__code__:
            requested = caller.f_locals["num_blocks"]
            walked = _walk(self.free_block_queue, counter)
            if walked < requested <= counter:
                observe("free_list", counter=counter, walked=walked, asked=requested)
        return counter

    BlockPool.get_num_free_blocks = get_num_free_blocks


def _walk(queue: Any, most: int) -> int:
    """Count the blocks that are linked in the free list, from its head on, up to `most`."""
    block, count = queue.fake_free_list_head.next_free_block, 0
    while block is not None and block is not queue.fake_free_list_tail and count < most:
        block, count = block.next_free_block, count + 1
    return count
