"""GitHub's rendering of a comment: its parser (cmark-gfm), and its rules for mentions."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

import cmarkgfm
from cmarkgfm.cmark import Options

# The extensions that github.com has on; raw HTML passes, as it does there for details and summary.
_OPTIONS = Options.CMARK_OPT_UNSAFE | Options.CMARK_OPT_GITHUB_PRE_LANG
_VOID = {"br", "hr", "img", "input"}

CALLS = (
    re.compile(r"(?<![\w`])@[A-Za-z0-9]"),  # a person or a team
    re.compile(r"(?<!\w)(?:[\w.-]+/[\w.-]+)?#\d"),  # an issue, of this repository or of another one
    re.compile(r"(?i)\bGH-\d"),
)


@dataclass
class Rendered:
    """text: nodes outside code and links. code: code blocks. links: link targets."""

    text: list[str] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    deepest: int = 0

    def calls(self) -> list[str]:
        return [
            found[0] for text in self.text for pattern in CALLS for found in pattern.finditer(text)
        ]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.seen = Rendered()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.tags.append(tag)
        if tag not in _VOID:
            self.seen.open.append(tag)
        self.seen.deepest = max(self.seen.deepest, self.seen.open.count("details"))
        if tag == "a":
            self.seen.links.append(dict(attrs).get("href") or "")
        if tag == "pre":
            self.seen.code.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.seen.open, f"</{tag}> without its beginning"
        assert self.seen.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "pre" in self.seen.open:
            self.seen.code[-1] += data
        elif not {"code", "a"} & set(self.seen.open):
            self.seen.text.append(data)

    def handle_comment(self, data: str) -> None:
        self.seen.comments.append(data)


def render(markdown: str) -> Rendered:
    """Return the page that GitHub shows.

    Raise AssertionError if elements are not properly nested.
    """
    reader = _Reader()
    reader.feed(cmarkgfm.github_flavored_markdown_to_html(markdown, options=_OPTIONS))
    reader.close()
    assert not reader.seen.open, f"not closed: {reader.seen.open}"
    return reader.seen
