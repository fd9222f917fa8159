"""Markdown, text, and HTML pages in one file, from templates that escape every value.

HTML shows a value through `clean`, Markdown through `cell`, and text through `printable`. Only
templates, macros and the filters below make markup. A page has its own style, no script, and a
policy that forbids everything else, also style attributes: use classes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup

from vllm_repro.report.format import limited, plural, seconds
from vllm_repro.report.model import issue_url
from vllm_repro.report.text import (
    cell,
    code,
    fence,
    markdown_table,
    one_line,
    plain,
    printable,
    shorten,
)

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
_LONGEST = 1 << 18
"""Most bytes of one value on a page."""


def clean(value: object) -> object:
    """Return markup as it is, and any other value as printable text of at most 256 KiB."""
    return value if isinstance(value, Markup) else shorten(printable(str(value)), _LONGEST)


def local_link(path: str) -> str:
    """Return a link to a file beside or below the page; `#` if `path` is empty or leads elsewhere.

    path: relative to the page.
    """
    parts = printable(path).split("/")
    if not path or "" in parts or ".." in parts or "\\" in path:
        return "#"
    return quote(path.encode("utf-8", "replace"), safe="/")


def _escaped(escape: Callable[[str], str]) -> Callable[[object], object]:
    """Return a function that escapes a value with `escape`, and returns markup as it is."""
    return lambda value: value if isinstance(value, Markup) else Markup(escape(str(value)))


_FINALIZE = {
    ".html": clean,
    ".md": _escaped(cell),
    ".txt": _escaped(printable),
    "line": _escaped(one_line),
}
_MARKDOWN: dict[str, Callable[..., str]] = {
    "code": code,
    "fence": fence,
    "plain": plain,
    "table": markdown_table,
    "issue_link": lambda issue: f"[{issue}]({issue_url(issue)})",
}
"""Filters that make Markdown."""


def _markup(filter_: Callable[..., str]) -> Callable[..., Markup]:
    """Return a template filter that marks its text as markup, so it is not escaped again."""
    return lambda *values, **named: Markup(filter_(*values, **named))


@cache
def _environment(folder: Path, kind: str) -> Environment:
    """Return the Jinja environment of a template folder, which escapes all values for a format.

    kind: the format, ".html", ".md", ".txt" or "line".
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here: it takes 0.1 s

    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_FINALIZE[kind],
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "limited": limited,
        "local_link": local_link,
        "number": "{:,}".format,
        "plural": plural,
        "seconds": seconds,
        "shorten": shorten,
    }
    if kind == ".md":
        environment.filters |= {name: _markup(maker) for name, maker in _MARKDOWN.items()}
    return environment


def fragment(template: str, folder: Path = TEMPLATES, *, kind: str = "", **values: Any) -> Markup:
    """Return a template filled with `values`. Raises `jinja2.UndefinedError` for a missing value.

    folder: where a feature has its templates; they may use those of this package. kind: "line" for
    values on one line (default: the suffix decides).
    """
    environment = _environment(folder, kind or Path(template).suffix)
    return Markup(environment.get_template(template).render(values))  # it is escaped


def plain_text(template: str, folder: Path = TEMPLATES, **values: Any) -> str:
    """Return a Markdown or text template filled with `values`, without empty lines at its end."""
    return str(fragment(template, folder, **values)).rstrip("\n")


def document(*, title: str, body: Markup, style: str = "") -> str:
    """Return the whole HTML page around `body`, the markup of a fragment.

    style: CSS to add to `templates/style.css`. The page's policy allows only this CSS, by its hash.
    Raises `ValueError` if the CSS would end its `<style>` element, and `TypeError` for a body that
    is no markup.
    """
    if not isinstance(body, Markup):
        raise TypeError("a page's body is markup that a template made")
    css = (TEMPLATES / "style.css").read_text(encoding="utf-8") + style
    if any(sign in css for sign in ("</", "<!--", "\r")):
        raise ValueError("a style sheet must not contain what ends its element")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return str(
        fragment("page.html", title=title, body=body, style=Markup(css), policy=Markup(policy))
    )
