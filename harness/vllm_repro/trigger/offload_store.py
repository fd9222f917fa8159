"""When vLLM's simple CPU offload connector lists a KV block twice in one store event, and the condition that it did. Pure.

A sliding-window layer gives blocks back as its window moves on. Where the pool is just short, the last chunk of the same prompt gets
some of them again: they stand twice in what the connector remembers of the request. To 0.21.0 its scan waits at the first of them that
has no hash yet, which is the prompt's own last block, not full. Once the answer has filled that block the scan runs on over old places
and new ones, and one store event lists every other such block twice. Each is then freed twice, to 0.23.0, and the counter of free
blocks says more than there are.

The arithmetic is that of one request alone in a pool that is otherwise free, a layer of full attention that gets its blocks before a
layer with a window, and stores that are over one step after the step that started them. It agrees with vLLM's own scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_repro.trigger.block_groups import played
from vllm_repro.trigger.trigger import Asked, Condition, Finding, TriggerFacts

__all__ = ["Pool", "block_listed_twice", "last_block_fills", "listed_twice", "own_blocks_back"]


@dataclass(frozen=True)
class Pool:
    """A KV cache. blocks: how many, one of which is never handed out. block_size, batch (a chunk) and window: in tokens."""

    blocks: int
    block_size: int
    batch: int
    window: int

    @property
    def per_chunk(self) -> int | None:
        """Blocks that one layer needs for a whole chunk; None where chunks do not end with a block."""
        return None if self.batch % self.block_size else self.batch // self.block_size


def last_block_fills(prompt: int, answer: int, block_size: int) -> bool:
    """Whether the prompt's last block is begun and not full, and an answer of so many tokens fills it.

    The answer's last token is never computed, so it fills nothing.
    """
    over = prompt % block_size
    return over >= 1 and over + answer - 1 >= block_size


def own_blocks_back(prompt: int, pool: Pool) -> int | None:
    """Blocks that the window gave back and the prompt gets again for its last chunk.

    None where this cannot be computed: an earlier chunk would already have needed such blocks, or the last one needs more of them.
    """
    chunk = pool.per_chunk
    if chunk is None or prompt < 1:
        return None
    before = -(-prompt // pool.batch) - 1  # chunks before the last one
    free = pool.blocks - 1
    if before and free < _held(before - 1, chunk) + 2 * chunk:
        return None
    last = -(-prompt // pool.block_size) - before * chunk
    back = 2 * last - (free - _held(before, chunk))
    if back <= 0:
        return 0
    # Those of the chunk before that the window has left. The ones from before it are known to the scan, or held by a store.
    given = max(0, (before * pool.batch - pool.window + 1) // pool.block_size - (before - 1) * chunk) if before else 0
    return back if back <= given else None


def _held(chunks: int, chunk: int) -> int:
    """Blocks that cannot be had after so many chunks: the full layer's, the window's last chunk, and one chunk that is being stored."""
    return (chunks + min(chunks, 2)) * chunk


def listed_twice(prompt: int, answer: int, pool: Pool) -> int | None:
    """Blocks that 0.20.0 to 0.21.0 list twice in one store event; None where it cannot be computed."""
    if not last_block_fills(prompt, answer, pool.block_size):
        return 0
    back = own_blocks_back(prompt, pool)
    if back is None:
        return None
    # The full layer is served first, so the last ones are the sliding layer's, and the very last waits to be filled.
    last = -(-prompt // pool.block_size) - (-(-prompt // pool.batch) - 1) * (pool.per_chunk or 0)
    sliding = min(back, last)
    # Where the answer's first token fills it, the full layer's new blocks are stored in the same event.
    full = back - sliding if prompt % pool.block_size == pool.block_size - 1 else 0
    return max(0, sliding - 1) + max(0, full - 1)


@dataclass(frozen=True)
class _ListedTwice(Condition):
    def find(self, facts: TriggerFacts) -> Finding:
        computed, seen = _computed(facts), _seen(facts)
        brief = seen.brief if seen.crossed or not computed.brief else computed.brief
        if computed.crossed and not seen.crossed and any(one.kind == "store" for one in facts.observed):
            brief += "; none was"
        return Finding(computed.crossed or seen.crossed, (*computed.evidence, *seen.evidence), brief)

    def __str__(self) -> str:
        return "block_listed_twice()"


def _seen(facts: TriggerFacts) -> Finding:
    """What the lab's plugin saw the connector store."""
    stores = [one.values for one in facts.observed if one.kind == "store"]
    doubled = [store for store in stores if store["distinct"] < store["blocks"]]
    short = next((one.values for one in facts.observed if one.kind == "free_list"), None)
    evidence: list[str] = []
    if doubled:
        first = doubled[0]
        more = f", and {len(doubled) - 1} more of {len(stores)} do so" if len(doubled) > 1 else ""
        evidence.append(
            f"seen: store event {first['event']} lists {first['blocks']} blocks, {first['distinct']} distinct{more}"
        )
    elif stores:
        evidence.append(f"seen: {len(stores)} store events, none lists a block twice")
    if short is not None:
        evidence.append(
            f"seen: {short['asked']} blocks are asked for, the counter says {short['counter']} and the free list has {short['walked']}"
        )
    brief = f"{doubled[0]['blocks'] - doubled[0]['distinct']} listed twice" if doubled else ""
    return Finding(bool(doubled), tuple(evidence), brief)


def _computed(facts: TriggerFacts) -> Finding:
    """What the server's own numbers say of the first request that must list a block twice; of the first one where none must."""
    if facts.shape is not None and facts.shape.window_groups:
        return played(facts)
    pool = _pool(facts)
    if isinstance(pool, str):
        return Finding(False, (f"not computed: {pool}",))
    found = [_request(asked, pool) for asked in facts.asked if asked.accepted and asked.prompt_tokens]
    nothing = Finding(False, ("no request reached the engine",), "no request")
    return next((finding for finding in found if finding.crossed), found[0] if found else nothing)


def _pool(facts: TriggerFacts) -> Pool | str:
    """The pool that the server was started with, or what is not known of it."""
    shape, blocks = facts.shape, facts.number("--num-gpu-blocks-override")
    if shape is None or shape.kinds != ("full", "sliding") or shape.window is None:
        return "that takes a model of one layer of full attention before one with a window, as the lab serves it"
    if blocks is None or facts.batch is None or facts.chunked is False:
        return "the pool's blocks and the size of a chunk are not known"
    return Pool(blocks, facts.number("--block-size") or shape.block_size, facts.batch, shape.window)


def _request(asked: Asked, pool: Pool) -> Finding:
    prompt, answer = asked.prompt_tokens or 0, asked.answer_tokens or 0
    counted = "usage" if asked.counted_by == "usage" else "/tokenize"
    said = f"{asked.name}: {prompt} prompt tokens by {counted}, {prompt % pool.block_size} over blocks of {pool.block_size}"
    if asked.cached_tokens:
        return Finding(False, (f"{said}; {asked.cached_tokens} came from the prefix cache, so it is not computed",))
    if not last_block_fills(prompt, answer, pool.block_size):
        text = f"{said}: an answer of {answer} does not fill a block that the prompt began"
        return Finding(False, (text,), "the last block stays as it is")
    twice = listed_twice(prompt, answer, pool)
    if twice is None:
        return Finding(False, (f"{said}; what comes back to it in a pool of {pool.blocks} blocks is not computed",))
    if not twice:
        return Finding(False, (f"{said}; a pool of {pool.blocks} blocks is not short for it",), "the pool is not short")
    back = own_blocks_back(prompt, pool)
    text = (
        f"{said}, and an answer of {answer} fills the last one; under the hybrid manager {back} of its own blocks come back to it in a "
        f"pool of {pool.blocks}, and to 0.21.0 the eager connector lists {twice} of them twice in one store event"
    )
    return Finding(True, (text,), f"{twice} must be listed twice to 0.21.0")


def block_listed_twice() -> Condition:
    """The connector listed a block twice in one store event, as the lab saw, or must do so to 0.21.0 by the server's own numbers."""
    return _ListedTwice()
