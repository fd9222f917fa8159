"""Byte-level BPE tokenizer in the format of `tokenizer.json`; the same on every machine.

Like a real tokenizer it encodes any text, joins common pieces of English and code into one token, and can split a character into
several tokens. The first merges are learnt from the text below. Pairs of ASCII characters fill the vocabulary, so that almost
every random token id is a piece of text.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from itertools import pairwise, product
from typing import Any

END_OF_TEXT = "<|endoftext|>"
START_OF_TURN = "<|im_start|>"
END_OF_TURN = "<|im_end|>"
PAD = "<pad>"
SPECIAL_TOKENS = (END_OF_TEXT, START_OF_TURN, END_OF_TURN, PAD)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens that vLLM's reasoning and tool-call parsers require. Unlike special tokens they appear in decoded text."""

Merge = tuple[str, str]

_LEARNT_MERGES = 320

_TEXT = """
The engine takes a request from the queue, gives it some of the blocks that are free, and runs the model for
one step. When the prompt is longer than the token budget of a step, only the first part of it is computed;
the rest of the prompt follows in the next steps, and every step reads the keys and values that the steps
before it have written. Requests that are already decoding go first, because each of them needs no more than
one token, and what is left of the budget is for the ones that are waiting. If there is no block left, the
request that came last is sent back to the queue and its blocks are given to the others, so that at least
one of them can come to its end. A user said hello to the assistant, and the assistant said hello to the
user. What is the answer? The answer is that nobody knows, but we can try again with another question.
Please write a short story about a small house by the sea, where an old man lives with his dog. In the
morning they walk along the water; in the evening they sit at the fire. One, two, three, four, five, six,
seven, eight, nine, ten. There are seven days in the week and twelve months in the year: January, February,
March, April, May, June, July, August, September, October, November and December.
def main(argument: str) -> int:
    for line in sorted(open(argument).read().split()):
        if line.startswith("#") or not line.strip():
            continue
        print("number of words:", len(line.split(" ")), "in", line)
    return 0
class Request:
    def __init__(self, prompt, max_tokens=16, temperature=1.0):
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.temperature = temperature
{"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": true, "max_tokens": 100}
"""


def special_id(token: str) -> int:
    """Return the id of one of `SPECIAL_TOKENS`."""
    return SPECIAL_TOKENS.index(token)


def tokenizer_json(vocab: int) -> dict[str, Any]:
    """Return the content of `tokenizer.json` with at most `vocab` tokens.

    Raises `ValueError` if `vocab` is too small for the special tokens and the 256 bytes.
    """
    tokens = [*SPECIAL_TOKENS, *MARKERS, *byte_alphabet()]
    if vocab < len(tokens):
        raise ValueError(f"a byte-level tokenizer needs at least {len(tokens)} tokens, not {vocab}")
    merges = list(_merges()[: vocab - len(tokens)])
    tokens += ["".join(merge) for merge in merges]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": token in SPECIAL_TOKENS,
            }
            for number, token in enumerate((*SPECIAL_TOKENS, *MARKERS))
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }


@cache
def byte_alphabet() -> tuple[str, ...]:
    """Return the character for each of the 256 bytes in a byte-level vocabulary.

    Printable bytes map to themselves. The others, including the space, map to characters from U+0100 on, so that no token
    contains a space or a control character.
    """
    prints = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    moved = iter(range(256, 512))
    return tuple(chr(byte) if byte in prints else chr(next(moved)) for byte in range(256))


@cache
def _merges() -> tuple[Merge, ...]:
    """Return every merge in order of rank; no two make the same token."""
    learnt = _learn(_TEXT, _LEARNT_MERGES)
    alphabet = byte_alphabet()
    ascii_characters = [alphabet[byte] for byte in range(ord(" "), ord("~") + 1)]
    known = {"".join(merge) for merge in learnt}
    pairs = [(left, right) for left, right in product(ascii_characters, repeat=2) if left + right not in known]
    return (*learnt, *pairs)


def _learn(text: str, count: int) -> list[Merge]:
    """Return the `count` best merges of a text: repeatedly, the most frequent pair of neighbours within a word."""
    alphabet = byte_alphabet()
    pieces = re.findall(r" ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+", text)
    words = [([alphabet[byte] for byte in piece.encode()], times) for piece, times in sorted(Counter(pieces).items())]
    merges: list[Merge] = []
    made: set[str] = set()
    while len(merges) < count:
        pairs: Counter[Merge] = Counter()
        for word, times in words:
            for pair in pairwise(word):
                pairs[pair] += times
        best = min(
            (pair for pair in pairs if "".join(pair) not in made),
            key=lambda pair: (-pairs[pair], pair),
            default=None,
        )
        if best is None:
            break
        merges.append(best)
        made.add("".join(best))
        words = [(_merged(word, best), times) for word, times in words]
    return merges


def _merged(word: list[str], merge: Merge) -> list[str]:
    out: list[str] = []
    for part in word:
        if out and (out[-1], part) == merge:
            out[-1] += part
        else:
            out.append(part)
    return out
