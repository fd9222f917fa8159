"""What must hold of vLLM's books after every step, whatever the workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

__all__ = ["Broken", "at_rest", "books", "listed_twice"]

Broken = tuple[str, str]
"""The name of an invariant, and what was seen."""


def books(pools: dict[str, Any], managers: tuple[Any, ...]) -> Iterator[Broken]:
    """Free lists against counters and reference counts, and those against the requests that hold blocks."""
    for name, pool in pools.items():
        queue = pool.free_block_queue
        free, whole = _walk(queue)
        if not whole:
            yield f"{name}-free-list-broken", f"the list of free blocks ends or turns back after {len(free)}"
        if len(free) != queue.num_free_blocks:
            yield f"{name}-free-count", f"the counter says {queue.num_free_blocks} free blocks, the list has {len(free)}"
        held = [block.block_id for block in free if block.ref_cnt > 0]
        if held:
            yield f"{name}-free-and-held", f"{len(held)} blocks are in the free list with a count above 0: {held[:6]}"
        ids = {block.block_id for block in free}
        for block in pool.blocks:
            if block.ref_cnt < 0 and not block.is_null:  # the null block's count is not kept
                yield f"{name}-negative-count", f"block {block.block_id} is counted {block.ref_cnt} times"
                break
        lost = [block.block_id for block in pool.blocks if not block.ref_cnt and not block.is_null and block.block_id not in ids]
        if lost and whole:
            yield f"{name}-lost", f"{len(lost)} blocks are neither free nor held: {lost[:6]}"
    holders: Counter[int] = Counter()
    for manager in managers:
        for blocks in manager.req_to_blocks.values():
            holders.update(block.block_id for block in blocks if not block.is_null)
    short = [(number, count) for number, count in holders.items() if pools["gpu"].blocks[number].ref_cnt < count]
    if short:
        number, count = short[0]
        said = pools["gpu"].blocks[number].ref_cnt
        yield "gpu-held-and-free", f"{len(short)} blocks have more holders than counts: block {number} {count}, counted {said}"


def _walk(queue: Any) -> tuple[list[Any], bool]:
    """The blocks of the free list, and whether it ends where it should."""
    found, seen = [], set()
    block, tail = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
    while block is not None and block is not tail:
        if block.block_id in seen:
            return found, False
        seen.add(block.block_id)
        found.append(block)
        block = block.next_free_block
    return found, block is tail


def listed_twice(transfers: list[tuple[str, list[int]]]) -> Iterator[Broken]:
    for direction, blocks in transfers:
        twice = [block for block, count in Counter(blocks).items() if count > 1]
        if twice:
            yield f"{direction}-listed-twice", f"a {direction} lists {len(blocks)} blocks, {len(set(blocks))} distinct"


def at_rest(pools: dict[str, Any], managers: tuple[Any, ...]) -> Iterator[Broken]:
    """When nothing runs and nothing is copied, no block may be held."""
    for name, pool in pools.items():
        held = [block.block_id for block in pool.blocks if block.ref_cnt > 0 and not block.is_null]
        if held:
            yield f"{name}-leak", f"{len(held)} of {len(pool.blocks)} blocks are held although nothing runs: {held[:6]}"
    left = sorted({name for manager in managers for name, blocks in manager.req_to_blocks.items() if blocks})
    if left:
        yield "request-leak", f"the books of finished requests are kept: {', '.join(left[:4])}"
