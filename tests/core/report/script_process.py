"""`repro.py` in a fork of a process that imported the SDK, which takes 0.5 s of CPU time."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["openai"])


def run_script(folder: Path, environment: Mapping[str, str]) -> tuple[int | None, str]:
    """Run `repro.py` in its folder. Return its exit status and all that it printed."""
    process = _CONTEXT.Process(target=_run, args=(folder, dict(environment)))
    process.start()
    process.join(120)
    status = process.exitcode
    process.kill()
    process.join()
    return status, (folder / "printed").read_text(encoding="utf-8")


def _run(folder: Path, environment: dict[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with open("printed", "w") as printed:  # noqa: PTH123  # in the folder of the script
        for stream in (1, 2):
            os.dup2(printed.fileno(), stream)
    sys.argv = ["repro.py"]
    runpy.run_path("repro.py", run_name="__main__")
