from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.github_markdown import render
from vllm_repro.report.text import cell, code, fence, html, plain, printable, shorten, size

NASTY = st.text(
    st.sampled_from("ab1 `~*_[]()<>!#@|\\&;:/.-+=$\n\r\t\x00\x1b\u202e\ud800" + "@u#1"), max_size=60
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@settings(max_examples=100)
@given(NASTY)
def test_a_fence_keeps_its_text(text: str) -> None:
    page = render(f"before\n\n{fence(text, 'text')}\n\nafter")
    assert (
        page.code == [printable(text).rstrip("\n") + "\n"]
        or "`" * 17 in text
        or not printable(text).strip()
    )
    assert len(page.code) == 1
    assert [words for words in page.text if words.strip()] == ["before", "after"]


@settings(max_examples=100)
@given(NASTY)
def test_plain_text_stays_text(text: str) -> None:
    page = render(plain(text))
    assert "".join(page.text).replace("\u200b", "").strip() == " ".join(printable(text).split())
    assert page.calls() == []
    assert set(page.tags) <= {"p"}


@settings(max_examples=100)
@given(NASTY)
def test_a_cell_is_one_cell(text: str) -> None:
    page = render(
        f"| a | b | c |\n|---|---|---|\n| x | {cell(text)} | {code(text, in_table=True)} |"
    )
    assert page.tags.count("td") == 3
    assert page.tags.count("tr") == 2
    assert set(page.tags) <= {"table", "thead", "tbody", "tr", "th", "td", "code"}
    assert page.calls() == []


@settings(max_examples=100)
@given(NASTY)
def test_inline_code_and_summaries_stay_text(text: str) -> None:
    inline = render(f"x {code(text)} y")
    folded = render(f"<details><summary>{html(text)}</summary>\n\nx\n\n</details>")
    assert set(inline.tags) == {"p", "code"}
    assert folded.tags == ["details", "summary", "p"]
    assert inline.calls() == folded.calls() == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "bad >=0.21.0,<0.24.0 [999999] _under_score_ a_b",
            r"bad >=0.21.0,<0.24.0 [999999] \_under_score\_ a_b",
        ),
        (
            "@user #1 owner/repo#2 GH-3",
            "@&#x200B;user #&#x200B;1 owner/repo#&#x200B;2 GH-&#x200B;3",
        ),
        ("https://github.com/a/b/issues/1", "https:&#x200B;//github.com/a/b/issues/1"),
        ("<b> a|b", r"\<b> a\|b"),
        ("1@.a", "1@&#x200B;.a"),
    ],
)
def test_escaped_text_stays_readable(text: str, expected: str) -> None:
    assert cell(text) == expected


@given(TEXT, st.integers(0, 400))
def test_a_text_is_shortened_to_bytes(text: str, limit: int) -> None:
    short = shorten(text * 10, limit)
    assert size(short) <= limit
    assert short == text * 10 or size(text * 10) > limit


def test_the_middle_is_left_out_and_counted() -> None:
    short = shorten("a" * 1_000 + "b" * 1_000, 200)
    assert short.startswith("a" * 50)
    assert short.endswith("b" * 50)
    assert "bytes left out" in short
