"""Shadow of the KV cache: for each slot, a hash of the tokens up to the one computed there, in place of a tensor.

A step writes the slots of its tokens; a copy moves whole blocks. If a request then reads another prefix than its own, the engine would
silently answer from another request's KV.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from .invariants import Broken

__all__ = ["Content", "Shadow", "Store"]

Slots = list[int | None]


class Content(Protocol):
    """Content of the GPU blocks, that a connector copies."""

    def get(self, block: int, /) -> Any: ...
    def put(self, block: int, content: Any, /) -> None: ...


class Shadow:
    """Content of the GPU blocks."""

    def __init__(self, managers: Sequence[Any]) -> None:
        self._managers = managers
        self._blocks: dict[int, Slots] = {}
        self._chains: dict[str, tuple[list[int], list[int]]] = {}

    def get(self, block: int) -> Slots | None:
        """Return a copy of the slots of a block; None if nothing was written."""
        held = self._blocks.get(block)
        return None if held is None else list(held)

    def put(self, block: int, slots: Slots | None) -> None:
        if slots is None:
            self._blocks.pop(block, None)
        else:
            self._blocks[block] = list(slots)

    def copy(self, pairs: Iterable[Any]) -> None:
        """Make the copies within the GPU that a step begins with."""
        for source, target in [(one.src_block_id, one.dst_block_id) for one in pairs]:
            self.put(target, self.get(source))

    def compute(self, name: str, tokens: list[int], start: int, count: int) -> Iterable[Broken]:
        """Compute `count` tokens of a request from `start` on. Yield each wrong read."""
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
        """Return the slots of a block; None if layers with another block size wrote it last."""
        held = self._blocks.get(block)
        return held if held is not None and len(held) == size else None

    def _chain(self, name: str, tokens: list[int]) -> list[int]:
        """Return for each token a hash of it and all tokens before it."""
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
    # Without the hybrid manager a windowed layer keeps all its blocks.
    return window if "Sliding" in type(spec).__name__ else None


class Store:
    """Copies that a connector keeps, by its own block number."""

    def __init__(self, shadow: Content) -> None:
        self._shadow = shadow
        self._held: dict[int, Any] = {}

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
