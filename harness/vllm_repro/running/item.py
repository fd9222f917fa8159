"""One run on a node of a cluster, as a process: `python -m vllm_repro.running.item FOLDER`. `fleet` starts it.

Its standard input brings the `Item` and is its leash: when it closes, the run ends its server and the folder is removed.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from vllm_repro import __version__
from vllm_repro.errors import InfraError, ReproError
from vllm_repro.running.job import Job, SiteFacts
from vllm_repro.running.resume import read_run
from vllm_repro.running.run import run_one
from vllm_repro.running.terminal import Progress

__all__ = ["ERROR", "RUNS", "SITE", "Item"]

RUNS, SITE, ERROR = "runs", "site.json", "error.json"
"""In the folder of an item: the folder of all runs, the facts of the site, and why there is no run."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A run to do. resume: name of the folder of an interrupted run, or empty. diffs: content of the files of `--patch`.

    folder: the working folder of the command.
    """

    job: Job
    resume: str
    diffs: tuple[bytes, ...]
    folder: str
    version: str = __version__


def main(root: Path) -> int:
    """Run the item that the standard input brings, below `root`. Return the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an install is undone; a run has handlers of its own
    cut = threading.Event()
    try:
        item: Item = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_leash, args=[cut], daemon=True).start()
        _run(item, root)
    except ReproError as error:
        _write(root / ERROR, {"type": type(error).__name__, "message": f"{error}", "hint": error.hint})
    except KeyboardInterrupt:
        return 130
    finally:
        if cut.is_set():
            shutil.rmtree(root, ignore_errors=True)
    return 0


def _run(item: Item, root: Path) -> None:
    if item.version != __version__:
        text = f"the node has vllm-repro {__version__}, and the command is {item.version}"
        raise InfraError(text, hint="install the same vllm-repro on each node")
    if Path(item.folder).is_dir():  # so that a relative --model or --vllm means the same
        os.chdir(item.folder)
    patches = []
    for number, (path, data) in enumerate(zip(item.job.options.patch, item.diffs, strict=True)):
        (root / f"{number}").mkdir()
        patches.append(root / f"{number}" / path.name)
        patches[-1].write_bytes(data)
    job = replace(item.job, out=root / RUNS, options=replace(item.job.options, patch=tuple(patches)))
    unfinished = read_run(job.out / job.scenario.id / item.resume) if item.resume else None

    def chosen(site: SiteFacts, why: str) -> None:
        _write(root / SITE, {"kind": site.kind, "evidence": site.evidence, "version": site.version, "why": why})

    run_one(job, Progress(), chosen, unfinished)


def _write(path: Path, fields: Mapping[str, str | None]) -> None:
    """Write a small file at once: `fleet` reads the folder meanwhile."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(fields), encoding="utf-8")
    new.replace(path)


def _end_with_leash(cut: threading.Event) -> None:
    os.read(sys.stdin.fileno(), 1)  # not by way of `sys.stdin`, whose lock Python wants at exit
    cut.set()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
