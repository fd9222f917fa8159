"""A KV cache that groups of layers share, each with a block size of its own, and whether a block of it must be listed twice.

DeepSeek-V4 has five such groups, the smallest with blocks of 4 tokens, and one request fills most of the pool: it is preempted, goes on
from its own cached blocks, and gets blocks back in every chunk. No closed form holds for that. The pool is played through block by block,
by the rehearsal engine's own account of it, which agrees with vLLM's scheduler block for block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from packaging.version import InvalidVersion, Version

from vllm_repro.resources import rehearsal_module
from vllm_repro.trigger.trigger import Asked, Finding, TriggerFacts

__all__ = ["GroupedPool", "listed_twice", "played"]


@dataclass(frozen=True)
class GroupedPool:
    """blocks: how many, one of which is never handed out. batch: tokens of a chunk. groups: block size and window of each in tokens, full
    attention first and with window 0."""

    blocks: int
    batch: int
    groups: tuple[tuple[int, int], ...]

    @staticmethod
    def of_tokens(
        tokens: int,
        max_model_len: int,
        batch: int,
        groups: tuple[tuple[int, int], ...],
        pages: tuple[int, ...] = (),
    ) -> GroupedPool:
        """The pool whose size vLLM words as so many tokens: as often as the longest request would fit into it, times its length.

        pages: bytes of one block of each group's layers. To 0.24.0 what a request needs is counted in bytes, and those in blocks of the
        first group; without `pages` each block counts as one, as from 0.28.0 on.
        """
        weights = pages or (1,) * len(groups)
        needed = 0
        for (size, window), weight in zip(groups, weights, strict=True):
            reach = min(window - 1 + batch, max_model_len) if window else max_model_len
            needed += (-(-reach // size) + bool(window)) * weight
        whole = -(-needed // weights[0])
        # The log's number is cut to whole tokens, so the pool has the next whole number of blocks.
        return GroupedPool(-(-tokens * whole // max_model_len), batch, groups)


@lru_cache(maxsize=256)
def listed_twice(prompt: int, answer: int, pool: GroupedPool) -> int:
    """Entries that the eager stores of 0.20.0 to 0.21.0 have too many in one event, for a request alone in a pool that is free."""
    play: Callable[..., int] = rehearsal_module("forecast").listed_twice
    return play(prompt, answer, blocks=pool.blocks, groups=pool.groups, batched_tokens=pool.batch)


def played(facts: TriggerFacts) -> Finding:
    """What comes of the first request that must list a block twice; of the first one where none must."""
    pool = _pool(facts)
    if pool is None:
        return Finding(False, ("not computed: the sizes of the pool and of a chunk are not known",))
    found = [_request(asked, pool) for asked in facts.asked if asked.accepted and asked.prompt_tokens]
    nothing = Finding(False, ("no request reached the engine",), "no request")
    return next((finding for finding in found if finding.crossed), found[0] if found else nothing)


def _pool(facts: TriggerFacts) -> GroupedPool | None:
    """Of the server's own numbers; a pool of so many blocks by the flag, else of as many tokens as its log says."""
    longest, tokens, shape = facts.number("--max-model-len"), facts.boot.kv_cache_tokens, facts.shape
    if shape is None or facts.batch is None or facts.chunked is False:
        return None
    groups = ((facts.block_size, 0), *shape.window_groups)
    if blocks := facts.number("--num-gpu-blocks-override"):
        return GroupedPool(blocks, facts.batch, groups)
    pages = shape.group_pages if _counts_bytes(facts.boot.vllm_version) else ()
    return GroupedPool.of_tokens(tokens, longest, facts.batch, groups, pages) if tokens and longest else None


def _counts_bytes(version: str | None) -> bool:
    """Whether a release words its pool by bytes. 0.24.0 does and 0.28.0 does not; those between them were not looked at."""
    try:
        return version is None or Version(version) < Version("0.28.0")
    except InvalidVersion:
        return True


def _request(asked: Asked, pool: GroupedPool) -> Finding:
    prompt, answer = asked.prompt_tokens or 0, asked.answer_tokens or 0
    said = f"{asked.name}: {prompt} prompt tokens and an answer of {answer}, in a pool of {pool.blocks:,} blocks"
    twice = listed_twice(prompt, answer, pool)
    if not twice:
        return Finding(False, (f"{said}: played through, no block is listed twice",), "none listed twice")
    text = f"{said}: played through under the hybrid manager, to 0.21.0 the eager connector lists {twice} blocks twice in one store event"
    return Finding(True, (text,), f"{twice} must be listed twice to 0.21.0")
