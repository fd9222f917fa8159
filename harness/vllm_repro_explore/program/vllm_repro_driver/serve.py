"""Protocol: one line with the release, then one result line for each case on standard input.

Started as `python -m vllm_repro_driver`, which adds to it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def serve(
    prepare: Callable[[], None] = lambda: None,
    take_counts: Callable[[], Mapping[int, int]] = dict,
) -> None:
    """Play the cases on standard input until it ends; print a JSON line for each, and exit.

    prepare: called before vLLM is imported. take_counts: called after each case, for `reached` of
    its result.
    """
    # Ctrl-C is for the search, which then closes standard input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Reserve standard output for answers; send whatever vLLM prints to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        prepare()
        import vllm

        from .play import play
    except Exception as error:  # a changed vLLM may raise anything
        answer({"unsupported": f"{type(error).__name__}: {error}"})
        return
    logging.disable(logging.WARNING)
    answer({"version": str(vllm.__version__)})
    for line in sys.stdin:
        case = json.loads(line)
        started = time.perf_counter()
        outcome = play(case)
        if reached := take_counts():
            outcome["reached"] = reached
        answer(
            {
                "id": case.get("id"),
                **outcome,
                "ms": round((time.perf_counter() - started) * 1000, 1),
            }
        )
    atexit._run_exitfuncs()  # they remove temporary folders
    os._exit(0)  # the interpreter's own end takes seconds with torch


if __name__ == "__main__":
    serve()
