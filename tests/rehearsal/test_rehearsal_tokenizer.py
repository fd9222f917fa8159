"""The tokenizer is reversible, fast, and does not add up under concatenation."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearsal.tokenizer import TURN_END, TURN_START, Tokenizer

TOKENIZER = Tokenizer(151_936)


@given(st.text())
@settings(max_examples=300)
def test_decode_undoes_encode(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(
    st.text(alphabet=st.sampled_from("helowrd abc<|im_start|>\n 019é"), max_size=80), st.sampled_from([259, 300, 4096])
)
@settings(max_examples=200)
def test_every_vocabulary_size_is_reversible(text: str, vocab_size: int) -> None:
    tokenizer = Tokenizer(vocab_size)
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert all(0 <= token < vocab_size for token in tokens)


def test_counts_do_not_add_up() -> None:
    def count(text: str) -> int:
        return len(TOKENIZER.encode(text))

    assert count("hello") == 1
    assert count("hel") + count("lo") > count("hello")
    assert count(" hello world") == 2
    assert count("hello") + count("world") == count("hello world")
    assert count("helloworld") > 2
    assert count("xyzzy") > 1


def test_half_a_megabyte_takes_well_under_a_second() -> None:
    def seconds(text: str) -> float:
        began = time.perf_counter()
        tokens = TOKENIZER.encode(text)
        taken = time.perf_counter() - began
        assert TOKENIZER.decode(tokens) == text
        return taken

    assert seconds("hello world of strange xyzzy words, 12345 of them.\n" * 10_000) < 5
    assert seconds("a" * 500_000) < 5


def test_unused_ids_decode_to_something() -> None:
    assert TOKENIZER.decode([151_000]) == "<|unused_151000|>"
    assert TOKENIZER.decode([3 + 0xFF]) == "\ufffd"


def test_chat_template_adds_tokens_for_each_message() -> None:
    message = {"role": "user", "content": "hello"}
    one = TOKENIZER.encode_chat([message])
    two = TOKENIZER.encode_chat([message, message])
    bare = TOKENIZER.encode_chat([message], add_generation_prompt=False)
    assert one[0] == TURN_START
    assert one.count(TURN_END) == 1
    assert len(two) - len(one) == len(bare)
    assert TOKENIZER.decode(bare) == "<|im_start|>user\nhello<|im_end|>\n"
    assert TOKENIZER.decode(one) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("content", [[{"type": "text", "text": "hello"}], "hello"])
def test_content_may_come_in_parts(content: object) -> None:
    message = {"role": "user", "content": content}
    assert TOKENIZER.decode(TOKENIZER.encode_chat([message], False)) == "<|im_start|>user\nhello<|im_end|>\n"
