"""What each KV block would hold, without a tensor: for each slot, the tokens from the prompt's first to the one that was computed there.

A step writes the slots of the tokens that it computes, and a copy takes a whole block along. What a request reads must then be its own
prompt and answer so far: anything else is another request's KV, or none, and an engine would answer with it and say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .invariants import Broken

__all__ = ["Shadow", "Store"]

Slots = list[int | None]


class Shadow:
    """The content of the GPU's blocks."""

    def __init__(self, managers: Sequence[Any]) -> None:
        self._managers = managers
        self._blocks: dict[int, Slots] = {}
        self._chains: dict[str, tuple[list[int], list[int]]] = {}

    def get(self, block: int) -> Slots | None:
        """A copy of what a block holds, as a transfer takes it."""
        held = self._blocks.get(block)
        return None if held is None else list(held)

    def put(self, block: int, slots: Slots | None) -> None:
        if slots is None:
            self._blocks.pop(block, None)
        else:
            self._blocks[block] = list(slots)

    def copy(self, pairs: Iterable[Any]) -> None:
        """Copies within the GPU that a step begins with."""
        for source, target in [(one.src_block_id, one.dst_block_id) for one in pairs]:
            self.put(target, self.get(source))

    def compute(self, name: str, tokens: list[int], start: int, count: int) -> Iterable[Broken]:
        """One request's part of a step: `count` of its tokens from `start` on. Yields what it reads and should not."""
        chain = self._chain(name, tokens[: start + count])
        for number, manager in enumerate(self._managers):
            blocks = manager.req_to_blocks.get(name)
            if not blocks:
                continue
            size = manager.block_size
            yield from self._read(name, number, blocks, chain, start, size, _window(manager))
            for position in range(start, min(start + count, len(blocks) * size)):
                block = blocks[position // size]
                if not block.is_null:
                    slots = self._slots(block.block_id, size) or [None] * size
                    slots[position % size] = chain[position]
                    self._blocks[block.block_id] = slots

    def _read(
        self,
        name: str,
        group: int,
        blocks: Sequence[Any],
        chain: Sequence[int],
        start: int,
        size: int,
        window: int | None,
    ) -> Iterable[Broken]:
        low = max(0, start - window + 1) if window else 0
        if low >= start:
            return
        for index in range(low // size, -(-start // size)):
            block = blocks[index] if index < len(blocks) else None
            if block is None or block.is_null:
                yield (
                    "reads-nothing",
                    f"{name} reads token {max(low, index * size)} of group {group} and has no block for it",
                )
                return
            slots = self._slots(block.block_id, size)
            for position in (max(low, index * size), min(start, (index + 1) * size) - 1):
                held = slots[position % size] if slots else None
                if held != chain[position]:
                    what = "nothing was written" if held is None else "there is another prompt's"
                    yield (
                        "reads-wrong-content",
                        f"{name} reads token {position} of {start} in group {group}, block {block.block_id}: {what}",
                    )
                    return

    def _slots(self, block: int, size: int) -> Slots | None:
        """What a block holds for layers that put so many tokens into one; nothing where others wrote it last."""
        held = self._blocks.get(block)
        return held if held is not None and len(held) == size else None

    def _chain(self, name: str, tokens: list[int]) -> list[int]:
        """A number for each token that stands for it and all before it."""
        known, chain = self._chains.get(name, ([], []))
        if known != tokens[: len(known)]:
            known, chain = [], []
        last = chain[-1] if chain else 0
        for token in tokens[len(known) :]:
            last = hash((last, token))
            chain.append(last)
        self._chains[name] = (tokens, chain)
        return chain


def _window(manager: Any) -> int | None:
    spec = manager.kv_cache_spec
    window = getattr(spec, "sliding_window", None)
    # Without the hybrid manager a layer with a window is kept whole, and no more is read of it than of any other.
    return window if "Sliding" in type(spec).__name__ else None


class Store:
    """Where a connector keeps copies: its own blocks by number."""

    def __init__(self, shadow: Shadow) -> None:
        self._shadow = shadow
        self._held: dict[int, Slots] = {}

    def save(self, pairs: Iterable[tuple[int, int]]) -> None:
        for gpu, own in pairs:
            slots = self._shadow.get(gpu)
            if slots is None:
                self._held.pop(own, None)
            else:
                self._held[own] = slots

    def load(self, pairs: Iterable[tuple[int, int]]) -> None:
        for own, gpu in pairs:
            held = self._held.get(own)
            self._shadow.put(gpu, held)
