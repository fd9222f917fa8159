"""Play answers until a number or a time is reached, and print findings as JSON lines.

The argument names a JSON file: `first` and `answers` (numbers of seeds), `seconds`, `names` of
parsers (all if empty), `modules` (of vLLM; only searches that use one, if any does), and `known`,
the seeds by search whose findings are not printed. A line has a finding, a progress, why a parser
was left out, or at the end counts, outcomes and runs of counted statements.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from vllm_repro_driver import probe  # type: ignore[import-not-found]  # in PYTHONPATH

_ANSWER_S = 20
"""Seconds after which an answer counts as hung; most take a millisecond."""


def _hung(*_: object) -> None:
    raise TimeoutError(f"no message after {_ANSWER_S} s")


def _main(out: TextIO, options: dict[str, Any]) -> None:
    """Play the searches in turn, and print lines to `out`."""

    def put(**fields: Any) -> None:
        print(json.dumps(fields, ensure_ascii=False), file=out, flush=True)

    probe.register()  # before vLLM is imported
    from .searches import searches

    plays, left_out = searches(options["names"], set(options["modules"]))
    for name, why in left_out.items():
        put(left_out=name, why=why)
    printed: set[tuple[str, str, str]] = set()
    began, seed, order = time.monotonic(), options["first"], list(plays)
    most, seconds = options["answers"], options["seconds"]
    signal.signal(signal.SIGALRM, _hung)
    while order and (most is None or seed < options["first"] + most):
        if seconds is not None and time.monotonic() - began > seconds:
            break
        name = order[seed % len(order)]
        signal.alarm(_ANSWER_S)
        for finding in plays[name].play(seed):
            key = name, finding["split"], finding["wrong"]
            if key in printed or seed in options["known"].get(name, ()):
                continue
            printed.add(key)
            signal.alarm(6 * _ANSWER_S)
            put(finding={"name": name, "seed": seed, **plays[name].shrink(finding)})
        signal.alarm(0)
        seed += 1
        if not seed % 100:
            put(played=seed - options["first"])
    put(
        counts={name: search.counts for name, search in plays.items()},
        outcomes={name: search.outcomes for name, search in plays.items()},
        next=seed,
        runs=probe.take_counts(),
    )


if __name__ == "__main__":
    # vLLM may print to standard output
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)
        _main(lines, json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
