"""Protocol: one line with the release, then one result line for each case on standard input."""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import time
from typing import Any


def main() -> None:
    """Play the cases on standard input until it ends; print a JSON line for each."""
    # Ctrl-C is for the search, which then closes standard input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Reserve standard output for answers; send whatever vLLM prints to standard error.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    try:
        from vllm_repro_witness import register  # type: ignore[import-not-found]  # in PYTHONPATH

        from . import probe

        probe.register()
        register()  # before vLLM is imported; it sees imports first, and leaves them to the probe
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
        if reached := probe.take_counts():
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
    main()
