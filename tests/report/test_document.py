"""The page around a report: one file, a policy by hash, and no value that becomes markup."""

from __future__ import annotations

import base64
import hashlib
import re
from xml.etree.ElementTree import Element

import html5lib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from markupsafe import Markup

from vllm_repro.report.document import asset, document, fragment
from vllm_repro.report.escape import printable

XHTML = "{http://www.w3.org/1999/xhtml}"


def parsed(page: str) -> Element:
    """As a browser would build it; any mistake in the markup is an error."""
    tree: Element = html5lib.HTMLParser(strict=True).parse(page)
    return tree


def page(title: str = "A page", text: str = "text") -> str:
    body = fragment("parts.html").strip() + Markup("<main id=main><p>{}</p></main>").format(printable(text))
    return document(title=title, body=Markup(body), script=asset("copy.js"))


def test_the_policy_allows_the_page_s_own_style_and_script_by_hash_and_nothing_else() -> None:
    text = page()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    rules = dict(rule.split(" ", 1) for rule in policy[1].split("; "))
    assert rules.pop("default-src") == rules.pop("base-uri") == rules.pop("form-action") == "'none'"
    for name, tag in (("style-src", "style"), ("script-src", "script")):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert rules.pop(name) == f"'sha256-{digest}'"
    assert not rules


def test_a_page_without_a_script_allows_none() -> None:
    text = document(title="t", body=Markup("<main id=main></main>"))
    assert "<script" not in text
    assert "script-src" not in text


@given(st.text())
def test_any_text_stays_text(text: str) -> None:
    tree = parsed(page(text, text))
    shown = printable(text)
    (paragraph,) = tree.iter(f"{XHTML}p")
    assert (paragraph.text or "") == shown
    assert not list(paragraph)
    (title,) = tree.iter(f"{XHTML}title")
    assert (title.text or "") == shown


def test_text_in_place_of_a_body_is_refused() -> None:
    with pytest.raises(TypeError):
        document(title="t", body="<b>text</b>")  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize("text", ["</script>", "<!--", "x</STYLE>"])
def test_a_script_that_would_end_its_element_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ends its element"):
        document(title="t", body=Markup(""), script=text)


def test_a_name_that_a_template_misses_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        fragment("page.html", title="t")
