"""An HTML page in one file: templates, its own style, no script, and a policy that forbids everything else.

Templates show every value through `clean`: escaped, and without characters that do not print. Only templates and macros make markup.
The policy forbids style attributes: use classes.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from markupsafe import Markup

from vllm_repro.report.text import printable, shorten

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["TEMPLATES", "compile_page", "document", "fragment", "local_link"]

TEMPLATES = Path(__file__).parent / "templates"
_LONGEST = 1 << 18
"""Most bytes of one value on a page."""


def clean(value: object) -> object:
    """Return markup as it is, and any other value as printable text."""
    return value if isinstance(value, Markup) else shorten(printable(str(value)), _LONGEST)


def local_link(path: str) -> str:
    """Return a link to a file beside or below the page; `#` if `path` leads elsewhere."""
    parts = printable(path).split("/")
    if not path or "" in parts or ".." in parts or "\\" in path:
        return "#"
    return quote(path.encode("utf-8", "replace"), safe="/")


@cache
def _environment(folder: Path) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # here: 0.1 s of imports that only a page needs

    environment = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=clean,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["local_link"] = local_link
    return environment


def compile_page() -> None:
    """Compile the templates of a run's page, which takes a tenth of a second."""
    for template in ("report.html", "parts.html", "page.html"):
        _environment(TEMPLATES).get_template(template)


def fragment(template: str, folder: Path = TEMPLATES, **values: Any) -> Markup:
    """Render a template. Raises `jinja2.UndefinedError` for a missing value.

    folder: where a feature has its templates; they may use those of this package.
    """
    return Markup(_environment(folder).get_template(template).render(values))  # it comes escaped from the template


def document(*, title: str, body: Markup, style: str = "") -> str:
    """Return the page around `body`, the markup of a fragment.

    style: added to `templates/style.css`; its hash is all that the page's policy allows. Raises `ValueError` if it would end its element.
    """
    if not isinstance(body, Markup):
        raise TypeError("a page's body is markup that a template made")
    css = (TEMPLATES / "style.css").read_text(encoding="utf-8") + style
    if any(sign in css for sign in ("</", "<!--", "\r")):
        raise ValueError("a style sheet must not contain what ends its element")
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return str(fragment("page.html", title=title, body=body, style=Markup(css), policy=Markup(policy)))
