"""Prompt lengths at which scenarios' own arithmetic crosses the boundary."""

from __future__ import annotations

from vllm_repro.scenario.catalogue import find
from vllm_repro.trigger.boundary import shortest_prompt
from vllm_repro.trigger.conditions import prefill_over
from vllm_repro.trigger.trigger import AttentionShape, TriggerFacts


def predicted(name: str, longest: int = 20_000) -> int | None:
    scenario = find(name)
    command, model = scenario.command_of(scenario.arms[0]), scenario.model
    facts = TriggerFacts(
        batch=command.number("--max-num-batched-tokens"),
        chunked=command.enabled("--enable-chunked-prefill"),
        command=command,
        shape=AttentionShape(
            model.heads, model.kv_heads, model.head_dim, block_size=model.block_size
        ),
    )
    return shortest_prompt(scenario.trigger, facts, longest)


def test_a_continuation_begins_129_tokens_after_the_batch() -> None:
    assert predicted("tq-chunked-prefill") == 4096 + 129
    assert predicted("tq-chunked-prefill", longest=4096 + 129) == 4096 + 129


def test_no_length_is_predicted_beyond_the_longest_prompt() -> None:
    assert predicted("tq-chunked-prefill", longest=4096 + 128) is None


def test_a_bug_of_flags_or_fields_or_cached_prefixes_has_no_length() -> None:
    names = (
        "tq-mtp-cudagraphs",
        "tq-mtp-first-request",
        "min-tokens-stop-ids",
        "tq-prefix-hit-unreserved",
    )
    assert [predicted(name) for name in names] == [None] * 4


def test_a_plain_length_is_found_and_one_that_every_prompt_has_is_not() -> None:
    assert shortest_prompt(prefill_over(7), TriggerFacts(batch=100), 50) == 8
    assert shortest_prompt(prefill_over(0), TriggerFacts(batch=100), 50) is None
    assert shortest_prompt(prefill_over(1), TriggerFacts(batch=100), 2) == 2
