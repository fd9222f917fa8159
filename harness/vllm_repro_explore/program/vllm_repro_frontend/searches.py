"""Searches of the front end by name."""

from __future__ import annotations

from typing import Any

from .formats import PAIRS, REASONING, TOOL_FORMATS
from .limit import HungError
from .output_search import OutputSearch
from .parser_search import ParserSearch

_NO_PARSERS, _NAMES = {"output processor", "ranks"}, {"output", "ranks"}


def searches(
    names: list[str], modules: set[str], exactly: list[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the searches, and why others are left out.

    names: of parsers, `output` or `ranks`; all searches if empty. modules: of vLLM; if searches
    have the code of all of them, those alone that have the code of one. exactly: the searches to
    return, if not empty. Raises `ImportError` if no parser can be made.
    """
    plays: dict[str, Any] = {}
    if not names or "output" in names:
        plays["output processor"] = OutputSearch()
    left_out: dict[str, str] = {}
    if (not names or "ranks" in names) and (not exactly or "ranks" in exactly):
        try:
            from .rank_search import RankSearch

            plays["ranks"] = RankSearch()
        except Exception as error:
            left_out["ranks"] = f"{type(error).__name__}: {error}"
    alone = [(tool, None) for tool in TOOL_FORMATS] + [(None, name) for name in REASONING]
    for tool, reasoning in (*alone, *PAIRS):
        words = tool and f"tool {tool}", reasoning and f"reasoning {reasoning}"
        name = " and ".join(filter(None, words))
        if (names and not {tool, reasoning} & {*names}) or (exactly and name not in exactly):
            continue
        try:
            plays[name] = ParserSearch(tool, reasoning)
        except Exception as error:
            left_out[name] = f"{type(error).__name__}: {error}"
        except HungError:
            left_out[name] = "hangs when it is made"
    if left_out and not plays.keys() - _NO_PARSERS and not (plays and {*names} <= _NAMES):
        whys = list(left_out.values())
        raise ImportError(next((why for why in whys if "registered" not in why), whys[0]))
    having = {name: search.modules & modules for name, search in plays.items()}
    if exactly or set().union(*having.values()) < modules:
        return {name: plays[name] for name in exactly if name in plays} or plays, left_out
    return {name: search for name, search in plays.items() if having[name]} or plays, left_out
