"""Play answers until a number or a time is reached, and print findings as JSON lines.

The argument is a JSON object: `first` and `answers` (numbers of seeds), `seconds`, `names` of
parsers (all if empty). A line has a finding, counts so far, or why a parser was left out.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from .formats import PAIRS, REASONING, TOOL_FORMATS
from .output_search import OutputSearch
from .parser_search import ParserSearch

_ANSWER_S = 20
"""Seconds after which an answer counts as hung; most take a millisecond."""


def _print(**fields: Any) -> None:
    print(json.dumps(fields, ensure_ascii=False), file=_OUT, flush=True)


def _hung(*_: object) -> None:
    raise TimeoutError(f"no message after {_ANSWER_S} s")


def _searches(names: list[str]) -> dict[str, Any]:
    """Return the searches by name; print why a parser is left out."""
    searches: dict[str, Any] = {} if names else {"output processor": OutputSearch()}
    alone = [(tool, None) for tool in TOOL_FORMATS] + [(None, name) for name in REASONING]
    for tool, reasoning in (*alone, *PAIRS):
        if names and not {tool, reasoning} & {*names}:
            continue
        name = " and ".join(
            text
            for text in (tool and f"tool {tool}", reasoning and f"reasoning {reasoning}")
            if text
        )
        try:
            searches[name] = ParserSearch(tool, reasoning)
        except Exception as error:
            _print(left_out=name, why=f"{type(error).__name__}: {error}")
    return searches


def _main() -> None:
    options = json.loads(sys.argv[1])
    searches = _searches(options["names"])
    known: set[tuple[str, str, str]] = set()
    began, seed = time.monotonic(), options["first"]
    most, seconds = options["answers"], options["seconds"]
    signal.signal(signal.SIGALRM, _hung)
    order = list(searches)
    while order and (most is None or seed < options["first"] + most):
        if seconds is not None and time.monotonic() - began > seconds:
            break
        name = order[seed % len(order)]
        signal.alarm(_ANSWER_S)
        for finding in searches[name].play(seed):
            key = name, finding["split"], finding["wrong"]
            if key in known:
                continue
            known.add(key)
            signal.alarm(6 * _ANSWER_S)
            _print(finding={"name": name, "seed": seed, **searches[name].shrink(finding)})
        signal.alarm(0)
        seed += 1
        if not seed % 100:
            _print(played=seed - options["first"])
    counts = {name: search.counts for name, search in searches.items()}
    _print(counts=counts, next=seed, seconds=round(time.monotonic() - began, 1))


if __name__ == "__main__":
    # vLLM may print to standard output
    _OUT = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _main()
