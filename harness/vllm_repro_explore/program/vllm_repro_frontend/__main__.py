"""Program that plays answers until a number or a time is reached, and prints JSON lines.

The argument names a JSON file: `first` (seed of each search), `answers` (most in all), `seconds`,
`names`, `modules` and `exactly` (see `searches`), and `known`, the seeds by search whose findings
are not printed. A line has a finding, a progress, why a parser was left out, or at the end counts,
outcomes, the next seed of each search and the runs of counted statements.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import cycle
from pathlib import Path
from typing import Any, TextIO

from vllm_repro_driver import probe  # type: ignore[import-not-found]  # in PYTHONPATH


def _main(out: TextIO, options: dict[str, Any]) -> None:
    """Play the searches in turn, and print lines to `out`.

    options: as in the module's docstring.
    """

    def put(**fields: Any) -> None:
        print(json.dumps(fields, ensure_ascii=False), file=out, flush=True)

    probe.register()  # before vLLM is imported
    try:
        from .searches import searches

        plays, left_out = searches(options["names"], set(options["modules"]), options["exactly"])
    except Exception as error:
        put(unfit=f"{type(error).__name__}: {error}")
        return
    for name, why in left_out.items():
        put(left_out=name, why=why)
    printed: set[tuple[str, str, str]] = set()
    seeds = dict.fromkeys(plays, options["first"])
    began, played = time.monotonic(), 0
    for name in cycle(plays):
        most, seconds = options["answers"], options["seconds"]
        if played == most or (seconds is not None and time.monotonic() - began > seconds):
            break
        for finding in plays[name].play(seeds[name]):
            key = name, finding["split"], finding["wrong"]
            if key in printed or seeds[name] in options["known"].get(name, ()):
                continue
            printed.add(key)
            put(finding={"name": name, "seed": seeds[name], **plays[name].shrink(finding)})
        seeds[name] += 1
        played += 1
        if not played % 100:
            put(played=played)
    put(
        counts={name: search.counts for name, search in plays.items()},
        outcomes={name: search.outcomes for name, search in plays.items()},
        ends=seeds,
        runs=probe.take_counts(),
    )


if __name__ == "__main__":
    # vLLM may print to standard output
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as lines:
        os.dup2(2, 1)
        _main(lines, json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
