"""Model of a KV block pool with one request, under the eager stores of vLLM 0.20.0 to 0.21.0.

One pool serves groups of layers, each with its own block size and window. A sliding window frees
blocks, and the same prompt may get them again. Such a block is twice in the list that vLLM's simple
CPU offload connector has of the request. So one store event, which is a list of blocks that the
connector copies to the CPU, may hold it twice. The model agrees with vLLM's own scheduler, whose
steps `fixtures/reference/sco-hybrid.json` records.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_STUCK = 3
"""Steps in a row without room for the request, after which it never gets its blocks."""


@dataclass(frozen=True)
class Group:
    """Layers with one KV block size and window, both in tokens; `window` 0 is full attention."""

    block_size: int
    window: int = 0

    def passed(self, computed: int) -> int:
        """Return how many leading blocks of a request the window has left behind.

        computed: tokens of the request that are computed. 0 for full attention.
        """
        return max(0, computed - self.window + 1) // self.block_size if self.window else 0

    def most_blocks(self, tokens: int, batch: int) -> int:
        """Return the most blocks of this group that a request of `tokens` tokens holds at once.

        batch: most tokens in one step.
        """
        whole = -(-tokens // self.block_size)
        if not self.window:
            return whole
        return min(whole, -(-min(self.window - 1 + batch, tokens) // self.block_size) + 1)


def blocks_of_tokens(
    tokens: int, max_model_len: int, batch: int, groups: Sequence[Group], pages: Sequence[int] = ()
) -> int:
    """Return the number of blocks of a KV cache whose size vLLM logs as `tokens` tokens.

    vLLM logs how often the longest request fits, times its length. batch: most tokens in one step.
    pages: bytes of a block of each group, for releases that weigh blocks by their bytes; without
    them each block counts as one.
    """
    weights = pages or (1,) * len(groups)
    needed = sum(
        _blocks_of_longest(group, max_model_len, batch) * weight
        for group, weight in zip(groups, weights, strict=True)
    )
    # Rounded up twice: to whole blocks of the longest request, each as large as one of the first
    # group, and to whole blocks of the pool, since the log cuts its number to whole tokens.
    return -(-tokens * -(-needed // weights[0]) // max_model_len)


def _blocks_of_longest(group: Group, max_model_len: int, batch: int) -> int:
    """Return the blocks of a group that vLLM counts for a request of `max_model_len` tokens.

    batch: most tokens in one step.
    """
    reach = min(group.window - 1 + batch, max_model_len) if group.window else max_model_len
    return -(-reach // group.block_size) + bool(group.window)


@dataclass
class _GroupBlocks:
    """Block numbers of a request in one group: those it holds, and those the connector lists."""

    # None if the window has passed the block.
    blocks: list[int | None] = field(default_factory=list)
    # Blocks that the connector still lists, freed ones too.
    listed: list[int | None] = field(default_factory=list)
    # Number of listed blocks that the connector has scanned.
    scanned: int = 0


Place = tuple[int, int]
"""A block's content: the group's number, and the block's place in the request."""


class BlockPool:
    """Simulated KV block pool with one request, whose blocks a connector copies to the CPU.

    A block that the connector copies twice at once is the bug of `sco-hybrid`.

    blocks: their number; vLLM never allocates the first. groups: of layers that share the pool.
    batch: most tokens of a chunk. An object simulates one request only.
    """

    def __init__(self, blocks: int, groups: Iterable[Group], batch: int) -> None:
        self._groups, self._batch = tuple(groups), batch
        self._free = dict.fromkeys(range(1, blocks))  # in order of allocation
        self._users = [0] * blocks
        self._content: list[Place | None] = [None] * blocks
        self._cached: dict[Place, list[int]] = {}
        self._stored: set[Place] = set()

    def listed_twice(self, prompt: int, answer: int) -> int:
        """Simulate a request; return how many of its blocks are twice in the worst store event.

        A store event is a list of blocks that the simple CPU offload connector copies to the CPU.
        prompt, answer: tokens. The simulation ends early if the request never gets its blocks. The
        pool cannot be used again.
        """
        held: list[_GroupBlocks] | None = None
        running: list[int] = []
        computed = generated = idle = twice = 0
        while generated < answer and idle < _STUCK:
            total, started = prompt + generated, list[int]()
            if held is None:
                computed, cached = self._cached_prefix(prompt)
                held = self._admit(cached, computed, total)
            elif not self._extend(held, computed, total):
                self._release(held)  # preempted: it restarts from its own cached blocks
                held = None
            idle = 0 if held else idle + 1
            if held:
                started = self._store(held, computed)
                computed = min(computed + self._batch, total)
                generated += computed == total  # the step that ends the prompt makes a token
            twice = max(twice, len(started) - len(set(started)))
            # A store finishes one step after the step that started it.
            self._stored.update(place for block in running if (place := self._content[block]))
            self._give_back(running)
            running = started
        return twice

    def _admit(
        self, cached: list[list[int | None]], computed: int, total: int
    ) -> list[_GroupBlocks] | None:
        """Allocate blocks for a request's first chunk; return all its blocks, by group.

        These include the blocks of its cached prefix. Return None, with nothing allocated, if the
        pool is too full. cached: the prefix's blocks by group; None for one that the window has
        passed. computed: tokens of that prefix. total: tokens of the request so far.
        """
        kept = [block for blocks in cached for block in blocks if block is not None]
        missing = sum(
            max(0, group.most_blocks(total, self._batch) - len(blocks))
            for group, blocks in zip(self._groups, cached, strict=True)
        )
        if missing + sum(not self._users[block] for block in kept) > len(self._free):
            return None
        self._hold(kept)
        held = [_GroupBlocks(blocks, list(blocks)) for blocks in cached]
        if self._extend(held, computed, total):
            return held
        self._release(held)
        return None

    def _release(self, held: list[_GroupBlocks]) -> None:
        """Free all blocks of a request, by group, the last block of each first."""
        for holding in held:
            self._give_back(reversed(holding.blocks))

    def _extend(self, held: list[_GroupBlocks], computed: int, total: int) -> bool:
        """Allocate blocks for the next chunk, after freeing those that the windows have passed.

        Also cache the blocks that the chunk fills. Return False, with no block allocated, if too
        few are free. held: the request's blocks by group. computed: its tokens before the chunk.
        total: its tokens so far.
        """
        end = min(computed + self._batch, total)
        counts = []
        for group, holding in zip(self._groups, held, strict=True):
            self._free_passed(holding.blocks, group.passed(computed))
            counts.append(max(0, -(-end // group.block_size) - len(holding.blocks)))
        if sum(counts) > len(self._free):
            return False
        for number, (group, holding, count) in enumerate(
            zip(self._groups, held, counts, strict=True)
        ):
            new = self._take(count)
            holding.blocks += new
            holding.listed += new
            self._cache(number, holding.blocks[: end // group.block_size])
        return True

    def _store(self, held: list[_GroupBlocks], computed: int) -> list[int]:
        """Return the blocks that the connector copies after a step, and keep them from being freed.

        Skip content that is stored already. The scan of a group goes on where it ended in the step
        before, and waits at a block that is not full. held: the request's blocks by group.
        computed: its tokens before the step.
        """
        stored: list[int] = []
        for group, holding in zip(self._groups, held, strict=True):
            for block in holding.listed[holding.scanned : computed // group.block_size]:
                if block is not None:
                    content = self._content[block]
                    if content is None:
                        break
                    if content not in self._stored:
                        stored.append(block)
                holding.scanned += 1
        self._hold(stored)
        return stored

    def _cached_prefix(self, prompt: int) -> tuple[int, list[list[int | None]]]:
        """Return how many leading tokens of the prompt every group has cached, and their blocks.

        The blocks are by group, None for one that the window has passed. The prompt's last token
        never counts.
        """
        length, cached = prompt - 1, list[list[int | None]]()
        coarsest = max(group.block_size for group in self._groups)
        for number, group in enumerate(self._groups):
            places = range(length // group.block_size)
            blocks = [next(iter(self._cached.get((number, place), ())), None) for place in places]
            length = _cached_tokens(blocks, group, coarsest)
            cached.append(blocks)
        for group, blocks in zip(self._groups, cached, strict=True):
            del blocks[length // group.block_size :]
            passed = group.passed(length)
            blocks[:passed] = [None] * min(passed, len(blocks))
        return length, cached

    def _free_passed(self, blocks: list[int | None], passed: int) -> None:
        """Free the first `passed` blocks, outside the window, and put None in their places."""
        left: list[int | None] = []
        for place in range(min(passed, len(blocks)) - 1, -1, -1):
            if blocks[place] is None:
                break
            left.append(blocks[place])
            blocks[place] = None
        self._give_back(left)

    def _take(self, count: int) -> list[int]:
        """Allocate `count` free blocks and evict their content.

        If fewer are free, allocate all of them; the caller checks the number first.
        """
        taken = [block for block, _ in zip(self._free, range(count), strict=False)]
        for block in taken:
            del self._free[block]
            self._users[block] = 1
            if (content := self._content[block]) is not None:
                self._cached[content].remove(block)
                self._content[block] = None
        return taken

    def _hold(self, blocks: Iterable[int]) -> None:
        """Add a user to each of these blocks, so that they are not free."""
        for block in blocks:
            self._free.pop(block, None)
            self._users[block] += 1

    def _give_back(self, blocks: Iterable[int | None]) -> None:
        """Remove a user from each of these blocks; those left without one are free."""
        returned = [block for block in blocks if block is not None]
        for block in returned:
            self._users[block] -= 1
        self._free.update((block, None) for block in returned if not self._users[block])

    def _cache(self, number: int, full: list[int | None]) -> None:
        """Add the full blocks of a group to the prefix cache, from the last back to a cached one.

        number: of the group. full: the request's full blocks in order.
        """
        for place in range(len(full) - 1, -1, -1):
            block = full[place]
            if block is None or self._content[block] is not None:
                break
            self._content[block] = (number, place)
            self._cached.setdefault((number, place), []).append(block)


def _cached_tokens(blocks: list[int | None], group: Group, coarsest: int) -> int:
    """Return the tokens of the longest head of a prompt whose blocks are cached; 0 if none is.

    Only heads of whole blocks of `coarsest` tokens count. With a window only the blocks that it
    still covers need to be cached. blocks: None for one that is not cached.
    """
    for end in range(len(blocks), 0, -1):
        tokens = end * group.block_size
        if not tokens % coarsest and None not in blocks[group.passed(tokens) : end]:
            return tokens
    return 0
