"""Searches of the front end by name."""

from __future__ import annotations

from typing import Any

from .formats import PAIRS, REASONING, TOOL_FORMATS
from .output_search import OutputSearch
from .parser_search import ParserSearch


def searches(names: list[str], modules: set[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the searches, and why others are left out.

    names: of parsers, or `output`; all searches if empty. modules: of vLLM; the searches whose own
    code they have, or all if they have the code of none.
    """
    plays: dict[str, Any] = {}
    if not names or "output" in names:
        plays["output processor"] = OutputSearch()
    left_out: dict[str, str] = {}
    alone = [(tool, None) for tool in TOOL_FORMATS] + [(None, name) for name in REASONING]
    for tool, reasoning in (*alone, *PAIRS):
        if names and not {tool, reasoning} & {*names}:
            continue
        words = tool and f"tool {tool}", reasoning and f"reasoning {reasoning}"
        name = " and ".join(filter(None, words))
        try:
            plays[name] = ParserSearch(tool, reasoning)
        except Exception as error:
            left_out[name] = f"{type(error).__name__}: {error}"
    near = {name: search for name, search in plays.items() if search.modules & modules}
    return near or plays, left_out
