"""One run on a node of a cluster: `run_item`, the task, which starts this module as a process in a folder of its own.

The standard input of the process brings the `Item` and is its leash: when it closes, the run ends its server and the folder is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from vllm_repro import __version__
from vllm_repro.errors import InfraError, ReproError
from vllm_repro.running.job import Job, SiteFacts
from vllm_repro.running.resume import read_run
from vllm_repro.running.run import run_one
from vllm_repro.running.terminal import Progress

__all__ = ["ERROR", "NODE", "OUTPUT", "SITE", "Item", "remove_left", "run_item"]

RUNS, SITE, OUTPUT, ERROR = "runs", "site.json", "output", "error.json"
"""In the folder of an item: the folder of all runs, the facts of the site, the output of its process, and why there is no run."""

NODE = "node"
"""Name of the chunk with the address of the node."""

Chunk = tuple[str, int, bytes]
"""A piece of a file: its name, its place, and the bytes, after which the file ends for now."""

_PREFIX, _LOCK = "vllm-repro-item-", "lock"
_POLL_S = 0.2
_CHUNK = 1 << 20


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


def run_item(item: Item, files: Mapping[str, bytes]) -> Iterator[Chunk]:
    """Run an item in a process, and yield what it writes while it writes it. files: of the folder of the scenario's runs."""
    import ray  # this is a process of Ray's

    yield NODE, 0, ray.util.get_node_ip_address().encode()
    remove_left()
    root = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = (root / _LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    runs = root / RUNS / item.job.scenario.id
    child = None
    try:
        for name, data in files.items():
            (runs / name).parent.mkdir(parents=True, exist_ok=True)
            (runs / name).write_bytes(data)
        with (root / OUTPUT).open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "vllm_repro.running.item", str(root)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its output shows why
            child.stdin.write(ray.cloudpickle.dumps(item))
            child.stdin.flush()
        sent = {name: len(data) for name, data in files.items()}
        ended = False
        while not ended:
            ended = child.poll() is not None
            yield from _news(root, runs, runs / (item.resume or "latest"), sent, ended=ended)
            time.sleep(0 if ended else _POLL_S)
    finally:
        if child is not None:
            with contextlib.suppress(BrokenPipeError):
                child.communicate()  # closes the leash
        shutil.rmtree(root, ignore_errors=True)
        lock.close()


def remove_left() -> None:
    """Remove the folders of items of which no process is left: Ray kills the processes of a worker that it ends."""
    for root in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError), (root / _LOCK).open("rb") as lock:  # held, or of another user
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(root, ignore_errors=True)


def _environment() -> dict[str, str]:
    """Return the environment that Ray was started with on this node, and the GPUs of the task.

    Ray adds variables to that of a task, such as OMP_NUM_THREADS, by which a server would be slower than without Ray.
    """
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(os.getppid()).environ()
        mine = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
        return {name: value for name, value in found.items() if not name.startswith("RAY_")} | mine
    return dict(os.environ)


def _news(root: Path, runs: Path, run: Path, sent: dict[str, int], *, ended: bool) -> Iterator[Chunk]:
    """Yield what was not sent yet: of files that only grow at any time, and all others at the end."""
    for name in (SITE, OUTPUT, ERROR):
        yield from _chunks(root / name, name, sent)
    run = run.resolve()
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = path.relative_to(runs.resolve()).as_posix()
        if path.suffix == ".jsonl" or path.parent.name == "logs":
            yield from _chunks(path, name, sent)
        elif ended:
            yield from _chunks(path, name, {})


def _chunks(path: Path, name: str, sent: dict[str, int]) -> Iterator[Chunk]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        at = file.seek(sent.get(name, 0))
        while (data := file.read(_CHUNK)) or name not in sent:  # also an empty file
            yield name, at, data
            at += len(data)
            sent[name] = at


# ── the process ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
