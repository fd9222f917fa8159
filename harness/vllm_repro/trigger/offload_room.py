"""The condition that the GPU keeps more KV blocks than the simple CPU offload connector has room for. Pure.

In its lazy mode the connector copies what stands first in line to be overwritten on the GPU, and throws its oldest copies away for that.
Once requests have filled the GPU's cache, all that stands there is worth a copy; where the connector has room for fewer, what it throws
away is still there to be copied again.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_repro.trigger.trigger import Condition, Finding, TriggerFacts

__all__ = ["offload_outgrown"]


@dataclass(frozen=True)
class _Outgrown(Condition):
    def find(self, facts: TriggerFacts) -> Finding:
        size, room, pool = facts.block_size, facts.boot.offload_blocks, _pool(facts)
        if room is None or pool is None:
            unknown = "the connector has room for" if room is None else "the GPU's cache has"
            return Finding(
                False, (f"no log line says how many blocks {unknown}",), "no connector" if room is None else ""
            )
        # Of one group of layers alone, so there may be more. One block of each pool is never handed out.
        filled = sum((facts.uncached(asked) or 0) // size for asked in facts.asked if asked.accepted)
        text = (
            f"the requests filled {filled} blocks of {size} tokens at least; the GPU's cache has {pool - 1}, and the connector "
            f"has room for {room - 1}"
        )
        stores = [one.values for one in facts.observed if one.kind == "store"]
        stored = sum(store["distinct"] for store in stores)
        seen = (f"seen: {len(stores)} store events of {stored} blocks in all",) if stores else ()
        brief = f"{filled} blocks into {pool - 1}, room for {room - 1}"
        return Finding(filled >= pool - 1 > room - 1, (text, *seen), brief)

    def __str__(self) -> str:
        return "offload_outgrown()"


def _pool(facts: TriggerFacts) -> int | None:
    """Blocks of the GPU's cache, by flag or by what the log says of its tokens."""
    tokens = facts.boot.kv_cache_tokens
    return facts.number("--num-gpu-blocks-override") or (tokens // facts.block_size if tokens else None)


def offload_outgrown() -> Condition:
    """The requests filled the GPU's cache, and the simple CPU offload connector has room for fewer blocks than that."""
    return _Outgrown()
