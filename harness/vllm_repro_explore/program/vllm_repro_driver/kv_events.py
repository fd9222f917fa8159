"""Index of the cached blocks that a router builds from vLLM's KV events.

Imports nothing of vLLM.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from .invariants import Broken

OF_CONNECTOR = object()
"""The event that a connector hands over in each step of a case."""


class KVIndex:
    """Publisher of KV events that keeps them as routers do, in place of vLLM's own.

    Some routers take the last event of a block as its state, others count: one event for each copy
    of a block. vLLM may be right for either, and in a case for one of them throughout.
    """

    def __init__(self) -> None:
        # (group, hash) of blocks whose last event is that they were stored
        self._cached: set[tuple[Any, Any]] = set()
        # how much more often a block was stored than removed
        self._counts: Counter[tuple[Any, Any]] = Counter()
        # the last event of a block was wrong: now only counting can be right
        self._counting = False
        self._events: list[Any] = []
        # a connector's event is not published yet
        self._handed_over = False

    def of_connector(self) -> list[Any]:
        """Return a connector's events for this step: one that must be published."""
        self._handed_over = True
        return [OF_CONNECTOR]

    def publish(self, batch: Any) -> None:
        """Take the events of a batch."""
        self._handed_over &= OF_CONNECTOR not in batch.events
        self._events += [event for event in batch.events if event is not OF_CONNECTOR]

    def check_connector(self) -> Iterator[Broken]:
        """Yield a violation if a connector's event was not published."""
        if self._handed_over:
            yield "events-of-connector", "an event of the connector was not published"

    def shutdown(self) -> None:
        """Do nothing: there is no socket to close."""

    def check(self, pool: Any, block_of: Callable[[Any], tuple[Any, Any]]) -> Iterator[Broken]:
        """Yield contradictions within events, and differences from the block pool on the GPU.

        Skip the differences while the pool has unpublished events. block_of: returns the (group,
        hash) that events have for a key of the pool's cache.
        """
        events, self._events = self._events, []
        for event in events:
            yield from self._take(event)
        if pool.kv_event_queue:
            return
        copies = {
            block_of(key): len(held) if isinstance(held, dict) else 1
            for key, held in pool.cached_block_hash_to_block._cache.items()
        }
        absent = copies.keys() - self._cached
        early = {block for block in absent if self._counts[block] > 0}
        self._counting |= bool(early)
        counts = {block: count for block, count in self._counts.items() if count}
        miscounted = counts.items() ^ copies.items() if self._counting else ()
        for name, blocks, what in (
            ("stale", self._cached - copies.keys(), "were stored, and are not in the cache"),
            ("missing", absent - early, "are in the cache, and were not stored, or were removed"),
            ("early", early, "were removed, and a copy of them is in the cache"),
            ("counted", miscounted, "have more or fewer events than copies"),
        ):
            if blocks:
                yield f"events-{name}", f"{len(blocks)} blocks {what}"

    def _take(self, event: Any) -> Iterator[Broken]:
        """Put an event into the index; yield a violation if it contradicts itself."""
        hashes = getattr(event, "block_hashes", None)
        if hashes is None:  # all blocks are cleared
            self._cached.clear()
            self._counts.clear()
            return
        blocks = {(event.group_idx, block_hash) for block_hash in hashes}
        if not hasattr(event, "token_ids"):
            self._cached -= blocks
            self._counts.subtract(blocks)
            return
        self._cached |= blocks
        self._counts.update(blocks)
        tokens = len(event.token_ids)
        # vllm-project/vllm#44488 would say which tokens each block has
        stated = getattr(event, "block_offsets", None) is not None
        if not stated and tokens != len(hashes) * event.block_size:
            yield (
                "events-tokens",
                f"an event has {tokens} tokens for {len(hashes)} blocks of {event.block_size}",
            )
