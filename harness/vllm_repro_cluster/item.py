"""One run on a node of a cluster, or one node of its server.

The task `run_item` starts `item_process` in a new folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from vllm_repro import __version__
from vllm_repro.running.job import Job
from vllm_repro.scenario.scenario import Arm
from vllm_repro.servers.multi_node import Meeting

RUNS, SITE, OUTPUT, ERROR = "runs", "site.json", "output", "error.json"
"""Names in the folder of an item.

They are: the folder of all runs, the facts of the site, the output of the item's process, and why
there is no run.
"""

STARTED, RANK_LOG, EXIT = "started.json", "latest/logs/rank.log", "latest/exit.json"
"""Files of a `Rank`: the facts of its server, its log, and how it exited.

The last two are below the folder of the runs.
"""

NODE = "node"
"""Name of the chunk with the address of the node."""

Chunk = tuple[str, int, bytes]
"""A piece of a file: file name, offset and bytes. The file ends after it for now."""

POLL_S = 0.2

_PREFIX, _LOCK = "vllm-repro-item-", "lock"
_CHUNK = 1 << 20
_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Variables with which the process of a run connects to the cluster.

It removes them before it starts a server.
"""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A node after the first, of a server on several: its rank, arm and where the nodes meet.

    arm: None only to fetch what the servers of the run need.
    """

    rank: int
    # None: only fetch what the arm's servers need
    arm: Arm | None = None
    meeting: Meeting | None = None


@dataclass(frozen=True, kw_only=True)
class Item:
    """One run, or one rank of its server, to do on a node, with all that the node must know."""

    job: Job
    # name of the folder of an interrupted run, or empty
    resume: str
    # content of the files of `--patch`
    diffs: tuple[bytes, ...]
    # working folder of the command
    folder: str
    # what a node must have free, as the arguments of `ray.remote`
    demand: Mapping[str, Any] = field(default_factory=dict)
    # number of nodes that each server needs
    nodes: int = 1
    # placement group with one bundle for each node
    group: Any = None
    # address of the cluster's head
    cluster: str = ""
    # address of the node; set by `run_item`
    address: str = ""
    # part of the run to do; None for the whole run
    rank: Rank | None = None
    version: str = __version__


def start_item(ray: Any, item: Item, node: int, files: Mapping[str, bytes]) -> Any:
    """Start `run_item` on the cluster and return the stream of its chunks.

    node: index in the item's placement group. files: as in `run_item`.
    """
    placed = {}
    if item.group is not None:
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        placed["scheduling_strategy"] = strategy(item.group, placement_group_bundle_index=node)
    return ray.remote(num_returns="streaming", max_retries=0, **item.demand, **placed)(
        run_item
    ).remote(item, files)


def run_item(item: Item, files: Mapping[str, bytes]) -> Iterator[Chunk]:
    """Run an item in a process on this node, and yield what it writes while it writes it.

    First yield the node's address. Remove the folders of killed items. At the end, or if the stream
    is cancelled, end the process and remove its folder.

    files: those to begin with, by name below the folder of the scenario's runs; they are not sent
    back.
    """
    import ray  # this is a process of Ray's

    address = ray.util.get_node_ip_address()
    yield NODE, 0, address.encode()
    remove_left_folders()
    root = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = (root / _LOCK).open("wb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    runs = root / RUNS / item.job.scenario.id
    child = None
    try:
        for name, content in files.items():
            (runs / name).parent.mkdir(parents=True, exist_ok=True)
            (runs / name).write_bytes(content)
        with (root / OUTPUT).open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "vllm_repro_cluster.item_process", str(root)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(_AUTH if item.nodes > 1 and item.rank is None else ()),
                start_new_session=True,
                pass_fds=[lock.fileno()],
            )
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its output shows why
            child.stdin.write(ray.cloudpickle.dumps(replace(item, address=address)))
            child.stdin.flush()
        sent = {name: len(content) for name, content in files.items()}
        ended = False
        while not ended:
            ended = child.poll() is not None
            yield from _unsent_changes(
                root, runs, runs / (item.resume or "latest"), sent, ended=ended
            )
            time.sleep(0 if ended else POLL_S)
    finally:
        if child is not None:
            with contextlib.suppress(BrokenPipeError):
                child.communicate()  # closes the leash
        shutil.rmtree(root, ignore_errors=True)
        lock.close()


def remove_left_folders() -> None:
    """Remove the folders that earlier items left on this node when they were killed.

    Ray kills the processes of a worker that it ends.
    """
    for root in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # held, or of another user
        with contextlib.suppress(OSError), (root / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(root, ignore_errors=True)


def _environment(kept: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment in which Ray was started, with the GPUs of the task.

    kept: variables of Ray to keep. If it cannot be read, return that of this process.

    Ray adds variables to that of a task, such as OMP_NUM_THREADS, which would make a server slower
    than without Ray.
    """
    with contextlib.suppress(psutil.Error):
        variables = psutil.Process(os.getppid()).environ()
        mine = {
            name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", *kept) if name in os.environ
        }
        return {
            name: value for name, value in variables.items() if not name.startswith("RAY_")
        } | mine
    return dict(os.environ)


def _unsent_changes(
    root: Path, runs: Path, run: Path, sent: dict[str, int], *, ended: bool
) -> Iterator[Chunk]:
    """Yield the unsent bytes of a run's files, and note those of growing files in `sent`.

    Logs, journals and the files of `root` are sent at any time, the others when it has `ended`.

    root: folder of the item. runs: folder of the scenario's runs. run: folder of the run. sent:
    bytes sent, by name.
    """
    for name in (SITE, STARTED, OUTPUT, ERROR):
        yield from _chunks(root / name, name, sent)
    run = run.resolve()
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = path.relative_to(runs.resolve()).as_posix()
        if path.suffix == ".jsonl" or path.parent.name == "logs":
            yield from _chunks(path, name, sent)
        elif ended:
            yield from _chunks(path, name, {})


def _chunks(path: Path, name: str, sent: dict[str, int]) -> Iterator[Chunk]:
    """Yield the bytes of a file beyond those in `sent`, in chunks, and note them there."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        at = file.seek(sent.get(name, 0))
        while (data := file.read(_CHUNK)) or name not in sent:  # also an empty file
            yield name, at, data
            at += len(data)
            sent[name] = at
