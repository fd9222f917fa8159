"""A page of HTML in one file: its templates, its own style and script, and a policy under which nothing else runs or is fetched.

Every value that a template shows goes through `clean`: escaped by Jinja2, and without characters that would not print. A template shows
markup only where another template or macro made it. Style attributes do not work under the policy: use classes, and in SVG attributes.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from vllm_repro.report.budget import held
from vllm_repro.report.escape import printable

__all__ = ["asset", "document", "fragment"]

_HERE = Path(__file__).parent
_LONGEST = 1 << 18
"""Bytes that one value may take on a page, so that no field of a journal fills it."""


def clean(value: object) -> object:
    """What a template shows of `value`: markup as it is, anything else as text that prints."""
    return value if isinstance(value, Markup) else held(printable(str(value)), _LONGEST)


def there(path: str) -> str:
    """A link to a file beside the page or below it; to the page itself where `path` leads elsewhere, or names a scheme."""
    parts = printable(path).split("/")
    if not path or "" in parts or ".." in parts or "\\" in path:
        return "#"
    return quote(path.encode("utf-8", "replace"), safe="/")


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=clean,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["there"] = there
    return made


def asset(name: str) -> str:
    """A style or script of this package, as it lies there."""
    return (_HERE / name).read_text(encoding="utf-8")


def fragment(template: str, **values: Any) -> Markup:
    """What `templates/<template>` makes of the values. Raises `jinja2.UndefinedError` where it names one that is missing."""
    return Markup(_environment().get_template(template).render(values))  # it comes escaped from the template


def document(*, title: str, body: Markup, script: str = "", style: str = "") -> str:
    """The whole page around `body`, which must be a fragment's markup, not text. Pure: the same arguments give the same bytes.

    script, style: the page's own, beside `style.css`; their hashes are all that the page's policy allows. Raises `ValueError` where
    one would end the element that it stands in.
    """
    if not isinstance(body, Markup):
        raise TypeError("a page's body is markup that a template made")
    css = asset("style.css") + style
    for text in (css, script):
        if any(sign in text.lower() for sign in ("</", "<!--", "\r")):
            raise ValueError("a style or a script must not hold what ends its element")
    policy = [
        "default-src 'none'",
        f"style-src {_hash(css)}",
        *([f"script-src {_hash(script)}"] if script else []),
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return str(
        fragment(
            "page.html",
            title=title,
            body=body,
            style=Markup(css),
            script=Markup(script),
            policy=Markup("; ".join(policy)),  # its quotes are single ones: they may stand as they are
        )
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
