"""The shortest prompt that meets a condition, by the condition's own arithmetic."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import replace

from vllm_repro.trigger.trigger import Condition, SentRequest, TriggerFacts


def shortest_prompt(condition: Condition, facts: TriggerFacts, longest: int) -> int | None:
    """Return the tokens of the shortest lone prompt that meets `condition`.

    None if the length does not decide it: one token meets the condition, or `longest` tokens do
    not. facts: of a server; its requests are ignored. The attention backend is assumed to be the
    one in the condition.
    """
    match = re.search(r"attention_backend\('(\w+)'\)", str(condition))
    facts = replace(facts, backend=match[1] if match else facts.backend)

    def crossed(tokens: int) -> bool:
        return condition.find(
            replace(facts, requests=(SentRequest("prompt", tokens, cached_tokens=0),))
        ).crossed

    if longest < 2 or crossed(1) or not crossed(longest):
        return None
    return bisect_left(range(longest), True, lo=1, key=crossed)
