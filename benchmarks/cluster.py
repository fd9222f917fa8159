"""What Ray costs: the same rehearsals here, through a running cluster of one node, and with `--on local`, in turn."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

ROUNDS = 5
BOOTS = 5
WORDS = ("run", "tq-chunked-prefill", "--server", "rehearsal", "--arm", "reported", "--trials", str(BOOTS))


@contextmanager
def cluster() -> Iterator[str]:
    """Start a cluster of one node and yield its address."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    started = Cluster(initialize_head=True, head_node_args=node)
    try:
        yield str(started.address)
    finally:
        started.shutdown()


def seconds(*words: str) -> float:
    """Return how long the command takes."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        program = [sys.executable, "-m", "vllm_repro", *WORDS, *words]
        subprocess.run(program, cwd=folder, check=True, capture_output=True)
        return time.monotonic() - began


def main() -> None:
    """Print the table."""
    with cluster() as address:
        ways = {"here": (), "a running cluster": ("--on", address), "`--on local`": ("--on", "local")}
        took: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, words in ways.items():
                took[way].append(seconds(*words))
    here = statistics.median(took["here"])
    print(f"{BOOTS} boots of the rehearsal, n = {ROUNDS}\n")
    print("| where | median, s | min to max, s | ratio to here | more, s |\n|---|---|---|---|---|")
    for way, times in took.items():
        middle = statistics.median(times)
        spread = f"{min(times):.1f} to {max(times):.1f}"
        print(f"| {way} | {middle:.1f} | {spread} | {middle / here:.2f} | {middle - here:.1f} |")


if __name__ == "__main__":
    main()
