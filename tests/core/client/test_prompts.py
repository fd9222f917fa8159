from __future__ import annotations

import asyncio
import re
import zlib
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.web import httpx
from vllm_repro.client.client import Client
from vllm_repro.client.prompts import PromptError, build_chat, build_completion, fit


class Counter:
    """Tokenizer stub that counts a text within a template. `cost`: tokens per piece."""

    def __init__(self, cost: int, overhead: int, merges: bool) -> None:
        self.cost = cost
        self.overhead = overhead
        self.merges = merges
        self.calls = 0

    async def __call__(self, text: str) -> int:
        self.calls += 1
        pieces = re.findall(r" ?\w+|\s+|[^\w\s]", text)
        if self.merges:  # the same piece twice in a row is one token: boundaries do not add up
            pieces = [
                piece for i, piece in enumerate(pieces) if i == 0 or pieces[i - 1] != piece or i % 2
            ]
        return self.overhead + sum(self.cost if len(piece) > 3 else 1 for piece in pieces)


@pytest.mark.parametrize("tokens", [64, 100, 4225, 7593, 90_000])
def test_an_ordinary_vocabulary_takes_two_calls(tokens: int) -> None:
    count = Counter(1, 11, False)
    text, calls = asyncio.run(fit(count, tokens, "seed"))
    assert (asyncio.run(count(text)), calls <= 2) == (tokens, True)


@given(st.integers(40, 5000), st.integers(1, 4), st.integers(0, 20), st.booleans())
@settings(max_examples=80)
def test_any_vocabulary_gives_the_exact_length(
    tokens: int, cost: int, overhead: int, merges: bool
) -> None:
    count = Counter(cost, overhead, merges)
    text, calls = asyncio.run(fit(count, tokens, "seed"))
    assert asyncio.run(count(text)) == tokens
    assert calls <= 40


def test_a_seed_gives_one_prompt_and_another_another_head() -> None:
    def make(seed: str) -> str:
        return asyncio.run(fit(Counter(1, 11, False), 500, seed))[0]

    assert make("1/a") == make("1/a")
    assert make("1/a").split()[0] != make("1/b").split()[0]


def test_a_prompt_shorter_than_the_template_is_refused() -> None:
    with pytest.raises(PromptError, match="chat template alone takes 30 tokens"):
        asyncio.run(fit(Counter(1, 30, False), 20, "seed"))


class Tokenizer:
    """`/tokenize` with one token per word. vocabulary: number of tokens."""

    def __init__(self, vocabulary: int = 2**32) -> None:
        self._vocabulary = vocabulary

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        assert path == "/tokenize"
        messages = body.get("messages")
        text = (
            str(body["prompt"])
            if messages is None
            else " ".join(str(message["content"]) for message in messages)
        )
        ids = [zlib.crc32(word.encode()) % self._vocabulary for word in text.split()]
        overhead = 0 if messages is None else 3 * len(messages) + 5 * len(body.get("tools", ()))
        content = {"tokens": ids, "count": len(ids) + overhead}
        return httpx.Response(
            200, json=content, request=httpx.Request("POST", "http://server/tokenize")
        )


def completed(tokens: int, seed: str, shared: int = 0, vocabulary: int = 2**32) -> list[int]:
    client = cast("Client", Tokenizer(vocabulary))
    made = asyncio.run(
        build_completion(client, "m", tokens, seed, shared=shared, shared_seed="head")
    )
    return list(made.body["prompt"])


@given(st.integers(0, 60), st.integers(1, 60))
def test_completions_differ_right_after_their_shared_head(shared: int, rest: int) -> None:
    one, other = (completed(shared + rest, seed, shared) for seed in ("1/a", "1/b"))
    assert len(one) == len(other) == shared + rest
    assert one[:shared] == other[:shared]
    assert one[shared] != other[shared]


@given(st.integers(1, 60), st.integers(8, 60), st.text(max_size=4))
def test_no_more_is_shared_than_was_asked_for(shared: int, rest: int, seed: str) -> None:
    whole = completed(shared + 1, "", shared + 1, vocabulary=3)
    made = completed(shared + rest, seed, shared, vocabulary=3)
    assert (len(made), made[:shared]) == (shared + rest, whole[:shared])
    assert made[shared] != whole[shared]


def test_a_chat_counts_earlier_messages_and_its_tools() -> None:
    before = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "yes"}]
    opening = {"role": "tool", "tool_call_id": "call_1"}
    made = asyncio.run(
        build_chat(
            cast("Client", Tokenizer()),
            "m",
            200,
            "1/a",
            before=before,
            message=opening,
            fields={"tools": [{"type": "function"}], "min_tokens": 3},
        )
    )
    *first, last = made.body["messages"]
    assert (first, last["role"], last["tool_call_id"]) == (before, "tool", "call_1")
    assert len(" ".join(message["content"] for message in (*first, last)).split()) + 9 + 5 == 200
