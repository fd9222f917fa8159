"""Prompt lengths at which scenarios' own arithmetic crosses the boundary."""

from __future__ import annotations

import pytest

from vllm_repro.scenario.catalogue import find
from vllm_repro.trigger.boundary import shortest_prompt
from vllm_repro.trigger.conditions import prefill_over
from vllm_repro.trigger.trigger import AttentionShape, TriggerFacts


@pytest.mark.parametrize(
    ("name", "longest", "length"),
    [
        # A chunked continuation begins 129 tokens after the batch.
        ("tq-chunked-prefill", 20_000, 4096 + 129),
        ("tq-chunked-prefill", 4096 + 129, 4096 + 129),
        # No length is predicted beyond the longest prompt.
        ("tq-chunked-prefill", 4096 + 128, None),
        # A bug of flags, fields or cached prefixes has no length.
        ("tq-mtp-cudagraphs", 20_000, None),
        ("tq-mtp-first-request", 20_000, None),
        ("min-tokens-stop-ids", 20_000, None),
        ("tq-prefix-hit-unreserved", 20_000, None),
    ],
)
def test_the_boundary_of_a_scenario(name: str, longest: int, length: int | None) -> None:
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
    assert shortest_prompt(scenario.trigger, facts, longest) == length


@pytest.mark.parametrize(
    ("over", "longest", "length"),
    [(7, 50, 8), (0, 50, None), (1, 2, 2)],  # every prompt is longer than 0
)
def test_the_boundary_of_a_plain_length(over: int, longest: int, length: int | None) -> None:
    assert shortest_prompt(prefill_over(over), TriggerFacts(batch=100), longest) == length
