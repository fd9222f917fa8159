"""Strict parser for pages: what a browser would repair is an error."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from xml.etree.ElementTree import Element, TreeBuilder

__all__ = ["parsed"]

_VOID = {"br", "col", "hr", "img", "input", "link", "meta", "wbr"}
_ENDS_A_PARAGRAPH = re.compile(
    "address|article|aside|blockquote|details|div|dl|figure|footer|form|h[1-6]|header|hr|main|nav"
    "|ol|p|pre|section|table|ul"
)
_CHILDREN = {
    "table": {"caption", "colgroup", "thead", "tbody", "tr"},
    "thead": {"tr"},
    "tbody": {"tr"},
    "tr": {"td", "th"},
    "ol": {"li"},
    "ul": {"li"},
    "html": {"head", "body"},
}
"""The only children of these elements, which hold no text."""
_CONTROLS = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff\\ufdd0-\\ufdef\\ufffe\\uffff]"
)


class _Strict(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tree = TreeBuilder()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attributes}
        assert len(named) == len(attributes), f"<{tag}> has an attribute twice"
        inside = self.open[-1] if self.open else None
        assert inside is not None or tag == "html", f"<{tag}> is not in <html>"
        assert tag in _CHILDREN.get(inside or "", {tag}), f"<{tag}> is in <{inside}>"
        assert "p" not in self.open or not _ENDS_A_PARAGRAPH.fullmatch(tag), (
            f"<{tag}> ends an open <p>"
        )
        assert tag != "a" or "a" not in self.open, "<a> is in <a>"
        self.tree.start(tag, named)
        if tag in _VOID:
            self.tree.end(tag)
        else:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag in _VOID or "svg" in self.open, f"<{tag}/> is not closed"
        self.handle_starttag(tag, attributes)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1:] == [tag], f"</{tag}> in {self.open}"
        self.tree.end(self.open.pop())

    def handle_data(self, data: str) -> None:
        if data.strip():
            assert self.open, f"text outside of <html>: {data!r}"
            assert self.open[-1] not in _CHILDREN, f"text in <{self.open[-1]}>: {data!r}"
        if self.open:
            self.tree.data(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data!r}")

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(f"a declaration: {data!r}")

    def handle_pi(self, data: str) -> None:
        raise AssertionError(f"an instruction: {data!r}")


def parsed(page: str) -> Element:
    """Return the tree of a page. Fails if an element is not closed or is where it may not be."""
    assert page.lower().startswith("<!doctype html>")
    assert not _CONTROLS.search(page)
    parser = _Strict()
    parser.feed(page)
    parser.close()
    assert not parser.open, f"not closed: {parser.open}"
    return parser.tree.close()
