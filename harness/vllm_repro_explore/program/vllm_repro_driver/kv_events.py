"""Index of the cached blocks that a router builds from vLLM's KV events.

Imports nothing of vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from .invariants import Broken


class KVIndex:
    """Publisher of KV events that keeps them as a router does, in place of vLLM's own."""

    def __init__(self) -> None:
        # (group, hash) of blocks in the GPU's pool: announced and not taken back since
        self._cached: set[tuple[Any, Any]] = set()
        # how often it was announced and not taken back, as routers count that expect copies
        self._counts: Counter[tuple[Any, Any]] = Counter()
        self._events: list[Any] = []

    def publish(self, batch: Any) -> None:
        """Take the events of a batch."""
        self._events += batch.events

    def shutdown(self) -> None:
        """Do nothing: there is no socket to close."""

    def check(self, pool: Any, block_of: Callable[[Any], tuple[Any, Any]]) -> Iterator[Broken]:
        """Yield differences between the index and vLLM's block pool on the GPU.

        Yield none while the pool has events that were not published yet. block_of: returns the
        (group, hash) that events have for a key of the pool's cache.
        """
        events, self._events = self._events, []
        for event in events:
            if getattr(event, "medium", "GPU") == "GPU":
                yield from self._take(event)
        if pool.kv_event_queue:
            return
        cached = {*map(block_of, pool.cached_block_hash_to_block._cache)}
        counted = {block for block, count in self._counts.items() if count > 0}
        for name, blocks, told in (
            ("stale", self._cached - cached, "were announced, and are not in the cache"),
            ("missing", cached - self._cached - counted, "are in the cache, and not announced"),
            ("early", (cached & counted) - self._cached, "were taken back, and a copy is left"),
            (
                "counted",
                counted - cached - self._cached,
                "were taken back less often than announced",
            ),
        ):
            if blocks:
                yield f"events-{name}", f"{len(blocks)} blocks {told}"

    def _take(self, event: Any) -> Iterator[Broken]:
        """Put an event into the index; yield a violation if it contradicts itself."""
        hashes = getattr(event, "block_hashes", None)
        if hashes is None:  # all blocks are cleared
            self._cached.clear()
            self._counts.clear()
            return
        blocks = {(event.group_idx, one) for one in hashes}
        if not hasattr(event, "token_ids"):
            self._cached -= blocks
            self._counts.subtract(blocks)
            return
        self._cached |= blocks
        self._counts.update(blocks)
        tokens = len(event.token_ids)
        if tokens != len(hashes) * event.block_size:
            yield (
                "events-tokens",
                f"an event has {tokens} tokens for {len(hashes)} blocks of {event.block_size}",
            )
