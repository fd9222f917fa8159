"""Prompts of an exact length in tokens.

The server's `/tokenize` counts them, with its chat template: another tokenizer is off by a few
tokens, and one token decides whether a boundary is crossed. A prompt begins with a salt, so that no
prefix cache shortens it, and is made from a seed, so that it can be repeated.

A text of known words is counted once, then padded with words that cost one token each in nearly
every vocabulary. That takes two or three calls, for 100 tokens as for 90,000. For other
vocabularies a few fillers are tried.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any

from vllm_repro.client.client import Client
from vllm_repro.errors import ReproError

_WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end
""".split()  # noqa: SIM905  # a list of words is shorter as text
_PADDING = (
    (" the", " and", " of"), (" a", " b", " c"), ("1", ".", ":"),
    (" a",), ("?",), ("#",), (" 7",), ("Q",), ("~",), ("\n",), (" x?",), ("é",),
)  # fmt: skip
"""Words that cost one token each in nearly every vocabulary, and others for the rest."""
_MOST_CALLS = 40
_IN_TEMPLATE = (
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
"""Fields that the chat template reads, in a chat completion and in `/tokenize`."""


class PromptError(ReproError):
    """No prompt of exactly the wanted number of tokens can be made for this server."""

    exit_status = 2


@dataclass(frozen=True)
class Prompt:
    """Generated prompt: the body fields that carry it, and its length in the server's tokens."""

    # fields of the request that carry the prompt
    body: dict[str, Any]
    # number of tokens, as the server counts
    tokens: int
    # number of calls of `/tokenize`
    calls: int
    # number of leading tokens that other prompts share
    shared: int = 0


# returns the number of tokens of a prompt with this text
Count = Callable[[str], Awaitable[int]]


def _text(words: int, seed: str) -> str:
    """Return `words` random English words, the same for the same seed."""
    return " ".join(random.Random(seed).choices(_WORDS, k=words))


def _salt(seed: str) -> str:
    """Return the beginning of a prompt: hex digits of the seed, unknown to any prefix cache."""
    return f"{random.Random('salt ' + seed).getrandbits(24):06x} "


async def fit(count: Count, tokens: int, seed: str) -> tuple[str, int]:
    """Return (a text that `count` counts as exactly `tokens` tokens, number of calls of `count`).

    Raises `PromptError` if there is none, or none is found in 40 calls.
    """
    calls = 0

    async def measure(text: str) -> int:
        nonlocal calls
        if calls >= _MOST_CALLS:
            raise PromptError(
                f"no text of exactly {tokens} tokens was found in {calls} calls of /tokenize"
            )
        calls += 1
        return await count(text)

    salt = _salt(seed)
    words = max(0, int(tokens * 0.85) - 24)
    text = salt + _text(words, seed)
    counted = await measure(text)
    while counted > tokens and words:  # words cost more than estimated: shrink
        words = max(0, int(words * tokens / counted * 0.97) - 1)
        text = salt + _text(words, seed)
        counted = await measure(text)
    if counted > tokens:
        text, counted = "", await measure("")
        if counted > tokens:
            raise PromptError(
                f"the chat template alone takes {counted} tokens, so no prompt of {tokens} tokens"
                " can be made",
                hint="state a larger size in the scenario's workload",
            )
    return await _pad(measure, text, counted, tokens), calls


async def _pad(measure: Count, text: str, counted: int, tokens: int) -> str:
    """Return `text`, which has `counted` tokens, lengthened to exactly `tokens` tokens.

    Raises `PromptError` if no padding fits; `measure` raises it after too many calls.
    """
    while counted < tokens:
        for words in _PADDING:
            missing = tokens - counted
            longer = text + _cycled(words, missing)
            now = await measure(longer)
            if now > tokens:  # more than one token a word: add fewer
                longer = text + _cycled(words, int(missing * missing / (now - counted)))
                now = await measure(longer)
            if counted < now <= tokens:
                text, counted = longer, now
                break
        else:
            raise PromptError(
                f"no text of exactly {tokens} tokens was found: {counted} is the nearest below"
            )
    return text


def _cycled(words: Sequence[str], count: int) -> str:
    """Return a text of `count` words, taken in turn: some vocabularies merge equal neighbours."""
    return "".join(islice(cycle(words), count))


async def build_chat(
    client: Client,
    model: str,
    tokens: int,
    seed: str,
    *,
    before: Sequence[dict[str, Any]] = (),
    message: Mapping[str, Any] = MappingProxyType({"role": "user"}),
    fields: Mapping[str, Any] = MappingProxyType({}),
) -> Prompt:
    """Return a chat prompt of exactly `tokens` tokens, those of the chat template included.

    It has the messages `before`, then `message` with generated content.

    fields: other fields of the request. Those that the template reads are counted, but none is in
    the prompt's body. Raises `PromptError` or `HTTPError`.
    """
    template_fields = {name: fields[name] for name in _IN_TEMPLATE if fields.get(name) is not None}

    def messages(text: str) -> list[dict[str, Any]]:
        return [*before, {**message, "content": text}]

    async def count(text: str) -> int:
        tokenized = await _tokenize(
            client, model, messages=messages(text), add_generation_prompt=True, **template_fields
        )
        return int(tokenized["count"])

    text, calls = await fit(count, tokens, seed)
    return Prompt({"messages": messages(text)}, tokens, calls)


async def build_completion(
    client: Client, model: str, tokens: int, seed: str, *, shared: int = 0, shared_seed: str = ""
) -> Prompt:
    """Return a completion prompt of exactly `tokens` token ids, made of random words.

    The first `shared` ids depend only on `shared_seed`, the others on `seed`. Raises `PromptError`
    or `HTTPError`.
    """
    if not shared or shared == tokens:
        return Prompt(
            {"prompt": await _ids(client, model, tokens, shared_seed if shared else seed)},
            tokens,
            1,
            shared,
        )
    *head, following = await _ids(client, model, shared + 1, shared_seed)
    ids = await _ids(client, model, tokens - shared + 1, seed)
    # If both continued with the same token by chance, one more would be shared, and could fill a
    # block of the prefix cache.
    differing = next((place for place, token in enumerate(ids) if token != following), 0)
    ids[0], ids[differing] = ids[differing], ids[0]
    return Prompt({"prompt": head + ids[:-1]}, tokens, 2, shared)


async def build_needle(client: Client, model: str, tokens: int, seed: str) -> tuple[Prompt, str]:
    """Return a prompt of `tokens` ids with a number hidden in the middle, and that number.

    The prompt ends with a question for the number. Raises `PromptError` if it does not fit in
    `tokens`, or `HTTPError`.
    """
    number = str(random.Random("needle " + seed).randrange(10_000, 100_000))
    sentences = (f" The secret number is {number}. Remember it.", "\nThe secret number is")
    middle, end = [
        (await _tokenize(client, model, prompt=text, add_special_tokens=False))["tokens"]
        for text in sentences
    ]
    around = tokens - len(middle) - len(end)
    if around < 2:
        raise PromptError(f"a needle and its question take more than {tokens} tokens")
    hay = await _ids(client, model, around, seed)
    ids = hay[: around // 2] + middle + hay[around // 2 :] + end
    return Prompt({"prompt": ids}, len(ids), 3), number


async def _ids(client: Client, model: str, tokens: int, seed: str) -> list[int]:
    """Return exactly `tokens` token ids of random words, from the server's `/tokenize`.

    Raises `PromptError` if the words give fewer.
    """
    # A word is at least one token; the rest is cut off.
    tokenized = await _tokenize(client, model, prompt=_salt(seed) + _text(tokens, seed))
    ids: list[int] = tokenized["tokens"]
    if len(ids) < tokens:
        raise PromptError(f"{tokens} words gave only {len(ids)} tokens")
    return ids[:tokens]


async def _tokenize(client: Client, model: str, **fields: Any) -> dict[str, Any]:
    """Return the server's JSON reply to `/tokenize` with these fields. Raises `HTTPError`."""
    response = await client.post("/tokenize", {"model": model, **fields})
    response.raise_for_status()
    reply: dict[str, Any] = response.json()
    return reply
