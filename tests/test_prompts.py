from __future__ import annotations

import asyncio
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro.prompts import PromptError, fit


class Counter:
    """A tokenizer as the builder sees it: a count of a text within a template. `cost` is tokens per piece."""

    def __init__(self, cost: int, overhead: int, merges: bool) -> None:
        self.cost = cost
        self.overhead = overhead
        self.merges = merges
        self.calls = 0

    async def __call__(self, text: str) -> int:
        self.calls += 1
        pieces = re.findall(r" ?\w+|\s+|[^\w\s]", text)
        if self.merges:  # the same piece twice in a row is one token: boundaries do not add up
            pieces = [piece for i, piece in enumerate(pieces) if i == 0 or pieces[i - 1] != piece or i % 2]
        long = sum(self.cost if len(piece) > 3 else 1 for piece in pieces)
        return self.overhead + long


@pytest.mark.parametrize("tokens", [64, 100, 4225, 7593, 90_000])
def test_an_ordinary_vocabulary_takes_two_calls(tokens: int) -> None:
    count = Counter(1, 11, False)
    text, calls = asyncio.run(fit(count, tokens, "seed"))
    assert asyncio.run(count(text)) == tokens
    assert calls <= 2


@given(st.integers(40, 5000), st.integers(1, 4), st.integers(0, 20), st.booleans())
@settings(deadline=None, max_examples=80)
def test_any_vocabulary_gives_the_exact_length(tokens: int, cost: int, overhead: int, merges: bool) -> None:
    count = Counter(cost, overhead, merges)
    text, calls = asyncio.run(fit(count, tokens, "seed"))
    assert asyncio.run(count(text)) == tokens
    assert calls <= 40


def test_a_seed_gives_the_same_prompt_and_another_a_different_head() -> None:
    def make(seed: str) -> str:
        return asyncio.run(fit(Counter(1, 11, False), 500, seed))[0]

    assert make("1/a") == make("1/a")
    assert make("1/a").split()[0] != make("1/b").split()[0]


def test_a_prompt_shorter_than_the_template_is_refused() -> None:
    with pytest.raises(PromptError, match="chat template alone takes 30 tokens"):
        asyncio.run(fit(Counter(1, 30, False), 20, "seed"))
