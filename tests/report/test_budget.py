from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.report.budget import LIMIT, fits, fitted, held, size
from vllm_repro.report.escape import fence

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


def test_letters_and_bytes_are_both_counted() -> None:
    assert fits("x" * LIMIT)
    assert not fits("x" * (LIMIT + 1))
    assert not fits("语" * (LIMIT // 2))
    assert size("语") == 3


@given(TEXT, st.integers(0, 400))
def test_a_text_is_held(text: str, limit: int) -> None:
    short = held(text * 10, limit)
    assert size(short) <= limit
    assert short == text * 10 or size(text * 10) > limit


def test_the_middle_goes_and_is_counted() -> None:
    short = held("a" * 1_000 + "b" * 1_000, 200)
    assert short.startswith("a" * 50)
    assert short.endswith("b" * 50)
    assert "bytes left out" in short


@given(TEXT, st.integers(60, 2_000))
def test_what_is_made_of_a_text_is_held_too(text: str, limit: int) -> None:
    made = fitted(lambda most: fence(held(text * 30 + "`" * 30, most)), limit)
    assert size(made) <= limit
