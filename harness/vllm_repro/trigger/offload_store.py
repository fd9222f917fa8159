"""Conditions on vLLM's simple CPU offload connector: a KV block stored twice, a CPU pool too small.

A sliding-window layer frees blocks as its window moves on. If the pool is almost full, the last
chunk of the same prompt gets some of them again, and the connector's list of the request has them
twice. Up to 0.21.0 its scan waits at the prompt's own last block, which is not full. When the
answer has filled that block, one store event, the list of blocks to copy to the CPU, has the others
twice. Up to 0.23.0 each is freed twice, and the counter of free blocks exceeds their number.
"""

from __future__ import annotations

from functools import lru_cache

from packaging.version import InvalidVersion, Version

from vllm_repro.trigger.block_pool import BlockPool, Group, blocks_of_tokens
from vllm_repro.trigger.trigger import (
    Amounts,
    AttentionShape,
    Condition,
    SentRequest,
    TriggerFacts,
    TriggerResult,
)


def _block_listed_twice(facts: TriggerFacts) -> TriggerResult:
    """Return whether the connector listed a block twice for one copy, by log or simulation."""
    computed, seen = _simulated_result(facts), _logged_result(facts)
    brief = seen.brief if seen.crossed or not computed.brief else computed.brief
    if (
        computed.crossed
        and not seen.crossed
        and any(event.kind == "store" for event in facts.observed)
    ):
        brief += "; here none was"
    crossed = computed.crossed or seen.crossed
    return TriggerResult(crossed, (*computed.evidence, *seen.evidence), brief, seen.amounts)


def _logged_result(facts: TriggerFacts) -> TriggerResult:
    """Return whether one of the connector's copies that the lab's plugin logged has a block twice.

    Also return the counts of free blocks, if the plugin logged them. Not crossed and without
    evidence outside the lab.
    """
    stores = [event.values for event in facts.observed if event.kind == "store"]
    doubled = [store for store in stores if store["distinct"] < store["blocks"]]
    short = next((event.values for event in facts.observed if event.kind == "free_list"), None)
    evidence: list[str] = []
    if doubled:
        first = doubled[0]
        more = f", and {len(doubled) - 1} more of {len(stores)} do so" if len(doubled) > 1 else ""
        evidence.append(
            f"seen: store event {first['event']} lists {first['blocks']} blocks,"
            f" {first['distinct']} distinct{more}"
        )
    elif stores:
        evidence.append(f"seen: {len(stores)} store events, none lists a block twice")
    amounts: tuple[Amounts, ...] = ()
    if short is not None:
        names = {"asked": "asked for", "walked": "in the free list", "counter": "by its counter"}
        amounts = (Amounts("blocks", tuple((words, short[name]) for name, words in names.items())),)
        evidence.append(
            f"seen: {short['asked']} blocks are asked for, the counter says {short['counter']} and"
            f" the free list has {short['walked']}"
        )
    brief = f"{doubled[0]['blocks'] - doubled[0]['distinct']} listed twice" if doubled else ""
    return TriggerResult(bool(doubled), tuple(evidence), brief, amounts)


def _simulated_result(facts: TriggerFacts) -> TriggerResult:
    """Return whether the connector lists a block of a request twice, by simulating the pool.

    It is the result of the first request for which it does, else of the most suspicious request
    (`TriggerFacts.suspects`). Not crossed if the layers, the pool's size or the batch are unknown,
    or chunked prefill is off.
    """
    groups = _groups(facts.shape, facts.block_size)
    if not groups:
        text = (
            "not computed: the model's layers are not known, or are not of full attention before"
            " sliding windows"
        )
        return TriggerResult(False, (text,))
    blocks = _blocks(facts, groups)
    if blocks is None or facts.batch is None or facts.chunked is False:
        return TriggerResult(
            False, ("not computed: the pool's blocks and the size of a chunk are not known",)
        )
    findings = [
        _request_result(request, blocks, groups, facts.batch)
        for request in facts.suspects
        if request.accepted and request.prompt_tokens
    ]
    nothing = TriggerResult(False, ("no request reached the engine",), "no request")
    return next(
        (finding for finding in findings if finding.crossed), findings[0] if findings else nothing
    )


def _groups(shape: AttentionShape | None, block_size: int) -> tuple[Group, ...]:
    """Return the layer groups that share the block pool, full attention first.

    Empty unless the layers are known to be of full attention, then of sliding windows.
    """
    if shape is not None and shape.window_groups:
        return Group(block_size), *(Group(*group) for group in shape.window_groups)
    if shape is not None and shape.kinds == ("full", "sliding") and shape.window is not None:
        return Group(block_size), Group(block_size, shape.window)
    return ()


def _blocks(facts: TriggerFacts, groups: tuple[Group, ...]) -> int | None:
    """Return the number of KV blocks that these groups share, by flag, else by the boot log.

    The log has the cache's size in tokens. None if unknown.
    """
    if blocks := facts.number("--num-gpu-blocks-override"):
        return blocks
    longest, tokens, shape = (
        facts.number("--max-model-len"),
        facts.boot.kv_cache_tokens,
        facts.shape,
    )
    if not (shape and longest and tokens and facts.batch):
        return None
    pages = shape.group_pages if _counts_bytes(facts.boot.vllm_version) else ()
    return blocks_of_tokens(tokens, longest, facts.batch, groups, pages)


def _counts_bytes(version: str | None) -> bool:
    """Return True if a release weighs blocks by their bytes in the pool size that it logs.

    See `blocks_of_tokens`. 0.24.0 does and 0.28.0 does not. True for those between and for an
    unknown version, too.
    """
    try:
        return version is None or Version(version) < Version("0.28.0")
    except InvalidVersion:
        return True


def _request_result(
    sent: SentRequest, blocks: int, groups: tuple[Group, ...], batch: int
) -> TriggerResult:
    """Return whether the connector lists blocks of this request twice, by simulation.

    Not crossed if part of its prompt was cached. batch: most tokens in one step.
    """
    prompt, answer = sent.prompt_tokens or 0, sent.answer_tokens or 0
    request = (
        f"{sent.name}: {prompt} prompt tokens {sent.counted} and an answer of {answer}, in a pool"
        f" of {blocks:,} blocks"
    )
    if sent.cached_tokens:
        return TriggerResult(
            False,
            (
                (
                    f"{request}; {sent.cached_tokens} came from the prefix cache, so it is not"
                    " computed"
                ),
            ),
        )
    twice = _listed_twice(prompt, answer, blocks, groups, batch)
    if not twice:
        return TriggerResult(False, (f"{request}: no block is listed twice",), "none listed twice")
    text = (
        f"{request}: under the hybrid manager, the eager connector lists {twice} blocks twice in"
        " one store event to 0.21.0"
    )
    return TriggerResult(True, (text,), f"{twice} would be listed twice up to 0.21.0")


@lru_cache(maxsize=256)
def _listed_twice(
    prompt: int, answer: int, blocks: int, groups: tuple[Group, ...], batch: int
) -> int:
    """Return from a cache how many blocks of a request one connector store lists twice, at most.

    prompt, answer: tokens. blocks: of the GPU's pool. batch: most tokens in one step. See
    `BlockPool.listed_twice`.
    """
    return BlockPool(blocks, groups, batch).listed_twice(prompt, answer)


def block_listed_twice() -> Condition:
    """Require that the simple CPU offload connector listed a block twice for one copy to the CPU.

    Evidence: store events that the lab logged, or a simulation of 0.20.0 to 0.21.0.
    """
    return Condition("block_listed_twice()", _block_listed_twice)


def _gpu_blocks(facts: TriggerFacts) -> int | None:
    """Return the number of blocks of a KV cache with one group of layers; None if unknown.

    By flag, else by the tokens in the log.
    """
    tokens = facts.boot.kv_cache_tokens
    return facts.number("--num-gpu-blocks-override") or (
        tokens // facts.block_size if tokens else None
    )


def offload_outgrown() -> Condition:
    """Require requests that filled the GPU's KV cache, and a smaller pool of the CPU connector.

    In lazy mode the simple CPU offload connector copies the GPU blocks that are overwritten next,
    and drops its oldest copies for them. After requests have filled the GPU's cache, each of those
    blocks has content to copy. If the CPU pool has fewer blocks, each dropped copy is made again.
    Evidence: pool sizes in the log or by flag; not met if one is unknown.
    """

    def find(facts: TriggerFacts) -> TriggerResult:
        size, room, pool = facts.block_size, facts.boot.offload_blocks, _gpu_blocks(facts)
        if room is None or pool is None:
            unknown = "the connector has room for" if room is None else "the GPU's cache has"
            return TriggerResult(
                False,
                (f"no log line says how many blocks {unknown}",),
                "no connector" if room is None else "",
            )
        # A lower bound: blocks of one group of layers. One block of each pool is never allocated.
        filled = sum(
            (facts.uncached(request) or 0) // size for request in facts.requests if request.accepted
        )
        text = (
            f"the requests filled at least {filled} blocks of {size} tokens; the GPU's cache has"
            f" {pool - 1}, and the connector has room for {room - 1}"
        )
        stores = [event.values for event in facts.observed if event.kind == "store"]
        stored = sum(store["distinct"] for store in stores)
        seen = (f"seen: {len(stores)} store events, {stored} blocks in all",) if stores else ()
        brief = f"{filled} blocks into {pool - 1}, room for {room - 1}"
        bars = (
            ("filled by the requests", filled),
            ("the GPU's cache has", pool - 1),
            ("the connector holds", room - 1),
        )
        # the requests filled the GPU's cache, and the connector holds less than that
        return TriggerResult(
            filled >= pool - 1 > room - 1, (text, *seen), brief, (Amounts("blocks", bars),)
        )

    return Condition("offload_outgrown()", find)
