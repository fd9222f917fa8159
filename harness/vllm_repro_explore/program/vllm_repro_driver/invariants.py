"""Invariants of vLLM's block accounting that hold after every step of any workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

Broken = tuple[str, str]
"""Name of an invariant, and what was observed."""


def books(pools: dict[str, Any], managers: tuple[Any, ...]) -> Iterator[Broken]:
    """Yield contradictions of free lists, counters, reference counts and block tables.

    managers: vLLM's KV cache manager of each layer group, which has the block tables.
    """
    for name, pool in pools.items():
        yield from _pool(name, pool)
    blocks = pools["gpu"].blocks
    tables = [table for manager in managers for table in manager.req_to_blocks.values()]
    holders = Counter([block.block_id for table in tables for block in table if not block.is_null])
    short = [(number, count) for number, count in holders.items() if blocks[number].ref_cnt < count]
    if short:
        number, count = short[0]
        stated = blocks[number].ref_cnt
        yield (
            "gpu-held-and-free",
            (
                f"{len(short)} blocks have more holders than counts: block {number} {count},"
                f" counted {stated}"
            ),
        )


def _pool(name: str, pool: Any) -> Iterator[Broken]:
    """Yield contradictions within one block pool: free list, counter and reference counts."""
    queue, blocks = pool.free_block_queue, pool.blocks
    free: list[Any] = []
    block, tail, most = (
        queue.fake_free_list_head.next_free_block,
        queue.fake_free_list_tail,
        len(blocks),
    )
    while block is not tail and block is not None and most >= 0:
        free.append(block)
        block = block.next_free_block
        most -= 1
    whole = block is tail
    if not whole:
        yield (
            f"{name}-free-list-broken",
            f"the list of free blocks does not end where it should, after {len(free)} blocks",
        )
    if len(free) != queue.num_free_blocks:
        yield (
            f"{name}-free-count",
            f"the counter says {queue.num_free_blocks} free blocks, the list has {len(free)}",
        )
    # The reference count of the null block is not maintained.
    counts = [1 if block.is_null else block.ref_cnt for block in blocks]
    held = [block.block_id for block in free if block.ref_cnt]
    if held:
        yield (
            f"{name}-free-and-held",
            f"{len(held)} blocks of the free list are counted as held: {held[:6]}",
        )
    if min(counts) < 0:
        yield (
            f"{name}-negative-count",
            f"block {counts.index(min(counts))} is counted {min(counts)} times",
        )
    if whole and counts.count(0) != len(free) - len(held):
        ids = {block.block_id for block in free}
        lost = [number for number, count in enumerate(counts) if not count and number not in ids]
        yield f"{name}-lost", f"{len(lost)} blocks are neither free nor held: {lost[:6]}"


def listed_twice(transfers: list[tuple[str, list[int]]]) -> Iterator[Broken]:
    """Yield a violation for each KV transfer that lists a block more than once."""
    for direction, blocks in transfers:
        twice = [block for block, count in Counter(blocks).items() if count > 1]
        if twice:
            yield (
                f"{direction}-listed-twice",
                f"a {direction} lists {len(blocks)} blocks, {len(set(blocks))} distinct",
            )


def at_rest(pools: dict[str, Any], managers: tuple[Any, ...]) -> Iterator[Broken]:
    """Yield a violation for each pool with held blocks, and one for kept block tables.

    Call it when no request runs and no copy is under way.
    """
    for name, pool in pools.items():
        held = [block.block_id for block in pool.blocks if block.ref_cnt > 0 and not block.is_null]
        if held:
            yield (
                f"{name}-leak",
                (
                    f"{len(held)} of {len(pool.blocks)} blocks are held although nothing runs:"
                    f" {held[:6]}"
                ),
            )
    left = sorted(
        {name for manager in managers for name, blocks in manager.req_to_blocks.items() if blocks}
    )
    if left:
        yield "request-leak", f"the books of finished requests are kept: {', '.join(left[:4])}"


def tier_books(manager: Any) -> Iterator[Broken]:
    """Yield a violation if the CPU's cache of OffloadingConnector has lost room.

    Yield nothing for a manager without these fields, such as one of another policy.
    """
    unit = "chunks" if hasattr(manager, "_num_chunks") else "blocks"  # in older releases
    kept = getattr(getattr(manager, "_policy", None), unit, None)
    size, free = (getattr(manager, f"_{name}_{unit}", None) for name in ("num", "get_num_free"))
    if kept is not None and size is not None and free and size - free() != len(kept):
        yield (
            "tier-lost",
            f"{size - free()} of {size} {unit} are taken, {len(kept)} are in the cache",
        )
