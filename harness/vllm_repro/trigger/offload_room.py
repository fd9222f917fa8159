"""Condition: the GPU holds more KV blocks than the simple CPU offload connector has room for.

In lazy mode the connector copies the GPU blocks that are overwritten next, and drops its oldest copies for them. Once requests have
filled the GPU's cache, each of those blocks is worth a copy. With room for fewer blocks, a dropped copy is made again and again.
"""

from __future__ import annotations

from vllm_repro.trigger.trigger import Condition, Rule, TriggerFacts, TriggerResult

__all__ = ["offload_outgrown"]


def _offload_outgrown(facts: TriggerFacts) -> TriggerResult:
    size, room, pool = facts.block_size, facts.boot.offload_blocks, _pool(facts)
    if room is None or pool is None:
        unknown = "the connector has room for" if room is None else "the GPU's cache has"
        return TriggerResult(
            False, (f"no log line says how many blocks {unknown}",), "no connector" if room is None else ""
        )
    # A lower bound: blocks of one group of layers. One block of each pool is never handed out.
    filled = sum((facts.uncached(asked) or 0) // size for asked in facts.requests if asked.accepted)
    text = (
        f"the requests filled at least {filled} blocks of {size} tokens; the GPU's cache has {pool - 1}, and the connector "
        f"has room for {room - 1}"
    )
    stores = [one.values for one in facts.observed if one.kind == "store"]
    stored = sum(store["distinct"] for store in stores)
    seen = (f"seen: {len(stores)} store events, {stored} blocks in all",) if stores else ()
    brief = f"{filled} blocks into {pool - 1}, room for {room - 1}"
    return TriggerResult(filled >= pool - 1 > room - 1, (text, *seen), brief)


def _pool(facts: TriggerFacts) -> int | None:
    """Return the blocks of the GPU's cache, by flag or from the log's number of tokens."""
    tokens = facts.boot.kv_cache_tokens
    return facts.number("--num-gpu-blocks-override") or (tokens // facts.block_size if tokens else None)


def offload_outgrown() -> Condition:
    """Require requests that filled the GPU's cache, and a simple CPU offload connector with room for fewer blocks."""
    return Rule("offload_outgrown()", _offload_outgrown)
