"""The page around a report: one file, a content policy by hash, and escaped values."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from markupsafe import Markup

from tests.core.report.html_tree import parsed
from vllm_repro.report.document import document, fragment, local_link, plain_text
from vllm_repro.report.text import cell, code, printable


def page(title: str = "A page", text: str = "text") -> str:
    return document(
        title=title, body=Markup("<main id=main><p>{}</p></main>").format(printable(text))
    )


def test_the_policy_allows_the_pages_own_style_and_nothing_else() -> None:
    text = page()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    none = dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert rules == {**none, "style-src": f"'sha256-{digest}'"}
    assert "<script" not in text


@given(st.text())
def test_any_text_stays_text(text: str) -> None:
    tree = parsed(page(text, text))
    for tag in ("p", "title"):
        (found,) = tree.iter(tag)
        assert (found.text or "") == printable(text)
        assert not list(found)


@pytest.mark.parametrize(
    "body",
    [
        *(
            "<p>",
            "</p>",
            "<p><div></div></p>",
            "<b><i></b></i>",
            "<table><td>x</td></table>",
            "<ul>x</ul>",
        ),
        *(
            "<!-- x -->",
            "<br id=a id=b>",
            "<div/>",
            "<a href=b><a href=c></a></a>",
            "<p>\x07</p>",
            "<![CDATA[x]]>",
        ),
    ],
)
def test_a_page_that_a_browser_would_repair_is_no_page(body: str) -> None:
    whole = "<!doctype html><html><head><title>t</title></head><body>{}</body></html>"
    assert parsed(whole.format("<p>text</p>")).findtext("body/p") == "text"
    with pytest.raises(AssertionError):
        parsed(whole.format(body))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: document(title="t", body="<b>text</b>"),  # type: ignore[arg-type]
            TypeError,
            "markup that a template made",
        ),
        (
            lambda: document(title="t", body=Markup(""), style="x</STYLE>"),
            ValueError,
            "ends its element",
        ),
        (lambda: fragment("page.html", title="t"), UndefinedError, "undefined"),
    ],
)
def test_what_would_break_the_page_is_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("text", ["a | b", "*@you* #1", "<b>", "# a\nhttps://x"])
def test_a_template_of_markdown_escapes_each_value(text: str, tmp_path: Path) -> None:
    (tmp_path / "made.md").write_text("{{ value }} {{ value | code }}\n\n", encoding="utf-8")
    assert plain_text("made.md", tmp_path, value=text) == f"{cell(text)} {code(text)}"
    with pytest.raises(UndefinedError):
        plain_text("made.md", tmp_path)


@pytest.mark.parametrize(
    ("path", "link"),
    [
        ("logs/a b-1.log", "logs/a%20b-1.log"),
        ("javascript:alert(1)", "javascript%3Aalert%281%29"),
        ("../../etc/passwd", "#"),
        ("//evil.example/x", "#"),
        ("/etc/passwd", "#"),
        ("\\\\evil\\x", "#"),
        ("", "#"),
    ],
)
def test_links_stay_beside_the_page(path: str, link: str) -> None:
    assert local_link(path) == link
