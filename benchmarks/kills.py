"""Random kills: SIGKILL a live run at a random moment; measure the time until nothing is left.

    python -m benchmarks.kills --seed 1 --write

This kills 120 rehearsals, 50 containers and 30 servers of real vLLM.

Nobody calls `clean`. A run has a state folder and a temporary folder of its own, and its processes
become children of the script.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.faults import (
    CELL_S,
    GONE_WITHIN_S,
    KILLS,
    KINDS,
    measured_at,
    sections,
    start_run,
    table,
    write_sections,
)
from vllm_repro.servers.docker_engine import RUN_LABEL

COUNTS = {"rehearsal": 120, "docker": 50, "process": 30}
SETTLED_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One killed run.

    after_s: from its start to the kill. gone_s: from the kill until nothing was left. left: if that
    never came.
    """

    kind: str
    after_s: float
    gone_s: float
    left: tuple[str, ...]


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent exits."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill(kind: str, after_s: float) -> Kill | None:
    """Start a run and kill it after so many seconds. Return None if it had ended by then."""
    with tempfile.TemporaryDirectory(prefix="kill-") as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        environment = {"XDG_STATE_HOME": str(folder / "state"), "TMPDIR": str(folder / "tmp")}
        command = start_run(folder, kind, environment)
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(after_s)
        ended = command.poll() is not None
        shared = set(_shared_memory())
        command.kill()
        command.wait()
        gone_s, left = _gone(kind, folder, shared)
        return (
            None
            if ended and not left
            else Kill(kind=kind, after_s=after_s, gone_s=gone_s, left=left)
        )


def life(kind: str) -> float:
    """Return how long a run lives that nobody kills, in seconds."""
    began = time.monotonic()
    if (one := kill(kind, CELL_S)) is not None:
        raise SystemExit(
            f"{kind}: a run that nobody kills never ends, or leaves {', '.join(one.left)}"
        )
    return time.monotonic() - began - SETTLED_S


def _gone(kind: str, folder: Path, shared: set[Path]) -> tuple[float, tuple[str, ...]]:
    """Return the seconds until nothing was left for a while, and what is left in the end."""
    began = last = time.monotonic()
    left: tuple[str, ...] = ()
    while time.monotonic() - last < SETTLED_S and time.monotonic() - began < 3 * GONE_WITHIN_S:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        shared |= set(_shared_memory())  # a server makes some until it is ended
        left = tuple(_left(kind, folder, shared))
        if left:
            last = time.monotonic()
        time.sleep(0.05)
    return last - began, left


def _left(kind: str, folder: Path, shared: set[Path]) -> Iterator[str]:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            yield f"process {' '.join(process.cmdline())[:80]}"
    for path in (
        *(folder / "state").glob("vllm-repro/leases/*"),
        *(folder / "tmp").iterdir(),
        *shared,
    ):
        if path.exists() and not path.name.startswith("torchinductor_"):  # a cache
            yield str(path)
    if kind == "docker":
        for run in (folder / "out").glob("steady/2*"):
            listed = [
                "docker",
                "ps",
                "--all",
                "--quiet",
                "--filter",
                f"label={RUN_LABEL}={run.name}",
            ]
            yield from subprocess.run(
                listed, capture_output=True, check=True, text=True
            ).stdout.split()


def _shared_memory() -> Iterator[Path]:
    """Yield the named shared memory and semaphores of the run's processes on this host."""
    inodes = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):  # ended by itself
            for line in Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8").splitlines():
                if "/dev/shm/" in line:  # the creator of a semaphore maps it by another name
                    inodes.add(int(line.split(maxsplit=5)[4]))
    for path in Path("/dev/shm").iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_ino in inodes:
                yield path


def kills(kind: str, count: int, seed: int, jobs: int, lasts: float | None) -> list[Kill]:
    """Return so many kills. lasts: how long a run lives, in seconds; None measures it."""
    chance = random.Random(seed)
    found: list[Kill] = []
    with ProcessPoolExecutor(jobs, initializer=adopt_orphans) as pool:
        lasts = lasts or pool.submit(life, kind).result()
        while len(found) < count:
            moments = [chance.uniform(0, 1.25 * lasts) for _ in range(count - len(found))]
            for one in pool.map(kill, [kind] * len(moments), moments):
                if one is not None:
                    found.append(one)
                    print(
                        f"{kind:9}  {one.after_s:6.1f} s  {one.gone_s:5.1f} s "
                        f" {', '.join(one.left)}",
                        flush=True,
                    )
    return found


SECTION = """\
The command `python -m benchmarks.kills --write` kills such runs with SIGKILL at a random moment
of their life, and measures the time until no process, container, lease, shared memory or
temporary file of the run is left. Nobody calls `clean`.

{table}
"""


def section(found: Sequence[Kill], seed: int, old: str) -> str:
    """Return the section of the page.

    Keep the rows of other kinds or seeds. old: the section until now.
    """
    found_rows = [
        line.strip("| ").split(" | ") for line in old.splitlines() if line.startswith("| ")
    ][2:]
    rows = {(row[0], row[5]): row for row in found_rows}
    for kind, count in Counter(one.kind for one in found).items():
        times = [one.gone_s for one in found if one.kind == kind]
        late = sum(seconds > GONE_WITHIN_S for seconds in times)
        row = [
            KINDS[kind],
            count,
            f"{statistics.median(times):.1f} s",
            f"{max(times):.1f} s",
            late,
            seed,
            measured_at(),
        ]
        rows[KINDS[kind], str(seed)] = [str(one) for one in row]
    head = [
        "server",
        "kills",
        "median",
        "longest",
        f"longer than {GONE_WITHIN_S:.0f} s",
        "seed",
        "measured",
    ]
    return SECTION.format(
        table=table(
            head, (row for kind in KINDS.values() for row in rows.values() if row[0] == kind)
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--count", type=int, help="kills of each kind (default: 120, 50 and 30)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--life",
        type=float,
        help="how long a run lives that nobody kills, in seconds (default: measured)",
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs at once")
    parser.add_argument(
        "--write", action="store_true", help="write the section of reports/results/reliability.md"
    )
    asked = parser.parse_args()
    found = [
        one
        for kind in asked.kinds
        for one in kills(kind, asked.count or COUNTS[kind], asked.seed, asked.jobs, asked.life)
    ]
    late = [one for one in found if one.gone_s > GONE_WITHIN_S]
    print(f"{len(found)} kills, {len(late)} left something for more than {GONE_WITHIN_S:.0f} s")
    if asked.write:
        write_sections({KILLS: section(found, asked.seed, sections().get(KILLS, ""))})
    raise SystemExit(bool(late))


if __name__ == "__main__":
    main()
