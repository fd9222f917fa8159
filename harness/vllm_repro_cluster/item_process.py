"""The process of an `Item` on a node: it runs the scenario, or starts one node of a server.

The process reads the `Item` from standard input. When that closes, it ends the server and removes
the folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vllm_repro import __version__
from vllm_repro.command.container import LOOPBACK
from vllm_repro.errors import InfraError, ReproError, Unsupported
from vllm_repro.host.ports import free_port
from vllm_repro.running.job import Job, SiteFacts
from vllm_repro.running.resume import read_run
from vllm_repro.running.run import run_one
from vllm_repro.running.terminal import Progress
from vllm_repro.servers.base import Exit, Server
from vllm_repro.servers.multi_node import process_nodes
from vllm_repro.servers.process import ProcessServer
from vllm_repro.servers.site import open_site
from vllm_repro_cluster.item import ERROR, EXIT, RANK_LOG, RUNS, SITE, STARTED, Item, Rank
from vllm_repro_cluster.ranks import ClusterNodes


def main(root: Path) -> int:
    """Run the item from standard input, below `root`. Return the exit status.

    It is 130 after an interrupt, else 0: a `ReproError` is written to the file `ERROR` in `root`.
    When standard input closes, stop and remove `root`.
    """
    # an install is undone; a run has handlers of its own
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cut = threading.Event()
    try:
        item: Item = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_leash, args=[cut], daemon=True).start()
        _run(item, root)
    except ReproError as error:
        _write(
            root / ERROR, {"type": type(error).__name__, "message": f"{error}", "hint": error.hint}
        )
    except KeyboardInterrupt:
        return 130
    finally:
        if cut.is_set():
            shutil.rmtree(root, ignore_errors=True)
    return 0


def _run(item: Item, root: Path) -> None:
    """Run the item's scenario, or one rank of its server, with its files below `root`.

    Go to the command's working folder if this node has it. Raises `ReproError`, and `InfraError` if
    the command is another version.
    """
    if item.version != __version__:
        text = f"the node has vllm-repro {__version__}, and the command is {item.version}"
        raise InfraError(text, hint="install the same vllm-repro on each node")
    if Path(item.folder).is_dir():  # so that a relative --model or --vllm means the same
        os.chdir(item.folder)
    patches = []
    for number, (path, diff) in enumerate(zip(item.job.options.patch, item.diffs, strict=True)):
        (root / f"{number}").mkdir()
        patches.append(root / f"{number}" / path.name)
        patches[-1].write_bytes(diff)
    job = replace(
        item.job, out=root / RUNS, options=replace(item.job.options, patch=tuple(patches))
    )
    if item.rank is not None:
        _run_rank(job, item.rank, root)
        return
    if item.nodes > 1:
        others = ClusterNodes(item, _say)
        hosts = [host for host in (item.address, *others.prepare()) if host != LOOPBACK]
        job = replace(
            job, others=others, private={**job.private, "hosts": [*job.private["hosts"], *hosts]}
        )
    unfinished = read_run(job.out / job.scenario.id / item.resume) if item.resume else None

    def chosen(site: SiteFacts, why: str) -> None:
        _write(
            root / SITE,
            {"kind": site.kind, "evidence": site.evidence, "version": site.version, "why": why},
        )

    run_one(job, Progress(), chosen, unfinished)


def _say(line: str) -> None:
    """Print a line of progress, which is sent to the machine of the command."""
    print(line, flush=True)  # a file is the standard output


def _run_rank(job: Job, rank: Rank, root: Path) -> None:
    """Prepare this node, start its part of the server, and return when that has exited.

    Write its facts, its log and its exit below `root`. Without an arm, only prepare.
    """
    site = open_site(job.scenario, job.options, job.choice, _say)
    runs = root / RUNS / job.scenario.id
    (log := runs / RANK_LOG).parent.mkdir(parents=True)
    if rank.arm is None or rank.meeting is None:
        _write(runs / EXIT, {"code": 0, "detail": "it is prepared"})
        return
    if why := site.why_not(rank.arm):
        raise Unsupported(why)
    with site.leased(job.scenario, job.options, _say):
        launch = site.launch(job.scenario, rank.arm, free_port())
        node = process_nodes(launch, rank.meeting)[rank.rank]
        server = ProcessServer(
            node.argv,
            port=free_port(),
            log=log,
            env=node.env,
            kind=launch.kind,
            evidence=launch.evidence,
        )
        ended = asyncio.run(_until_ended(server, root / STARTED))
    _write(runs / EXIT, {"code": ended.code, "detail": ended.detail})


async def _until_ended(server: Server, started: Path) -> Exit:
    """Start a server, write its facts to `started`, wait for its exit, and return that.

    Stop the server in any case.
    """
    try:
        facts = await server.start()
        _write(
            started,
            {
                name: value
                for name, value in asdict(facts).items()
                if name in ("kind", "evidence", "argv", "env", "pid")
            },
        )
        return await server.exited()
    finally:
        await server.stop()


def _write(path: Path, fields: Mapping[str, Any]) -> None:
    """Write JSON to a file, which appears whole: `run_item` reads the folder meanwhile."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(fields), encoding="utf-8")
    new.replace(path)


def _end_with_leash(cut: threading.Event) -> None:
    """Wait until standard input closes, then set `cut` and send SIGTERM to this process."""
    os.read(sys.stdin.fileno(), 1)  # not with `sys.stdin`, whose lock Python needs at exit
    cut.set()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
