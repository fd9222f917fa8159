"""Start-up of the command: seconds and memory of `--help`, of `list`, and of `run --server attach` until its first request arrives."""

from __future__ import annotations

import argparse
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

COMMAND = [sys.executable, "-m", "vllm_repro"]


def ended(*words: str) -> tuple[float, float]:
    """Return the seconds until the command has ended, and the most MiB of resident memory that it had."""
    began = time.monotonic()
    with subprocess.Popen([*COMMAND, *words], stdout=subprocess.DEVNULL) as command:
        _, status, used = os.wait4(command.pid, 0)
        took = time.monotonic() - began
        command.returncode = os.waitstatus_to_exitcode(status)
    if command.returncode:
        raise RuntimeError(f"vllm-repro {' '.join(words)} exited with {command.returncode}")
    return took, used.ru_maxrss / 1024


def first_request(scenario: str) -> tuple[float, float]:
    """Return the seconds until the first connection to the server, and the MiB of anonymous memory at that moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.TemporaryDirectory() as out:
        listener.settimeout(60)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        words = ["run", scenario, "--server", "attach", "--url", url, "--out", out]
        began = time.monotonic()
        with subprocess.Popen([*COMMAND, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as command:
            try:
                listener.accept()[0].close()
                took = time.monotonic() - began
                memory = Path(f"/proc/{command.pid}/smaps_rollup").read_text(encoding="ascii")
            finally:
                command.kill()
    anonymous = re.search(r"^Anonymous: +(\d+) kB", memory, re.MULTILINE)
    assert anonymous is not None
    return took, int(anonymous[1]) / 1024


def row(name: str, runs: Sequence[tuple[float, float]]) -> str:
    seconds, memory = zip(*runs, strict=True)
    shown = f"{statistics.median(seconds):.2f} ({min(seconds):.2f}..{max(seconds):.2f})"
    return f"| {name} | {shown} | {statistics.median(memory):.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "-n", type=int, default=10, metavar="N", help="starts of each; one more comes first and is not counted"
    )
    given = parser.parse_args()
    measured: dict[str, Callable[[], tuple[float, float]]] = {
        "`--help`": lambda: ended("--help"),
        "`list`": lambda: ended("list"),
        "`run --server attach`, to the first request": lambda: first_request("tq-chunked-prefill"),
    }
    print(f"\n### Start-up, n = {given.n}\n\n| command | seconds: median (min..max) | MiB |\n|---|---|---|")
    for name, measure in measured.items():
        print(row(name, [measure() for _ in range(given.n + 1)][1:]), flush=True)
    print("\nMemory: the most resident for the first two; anonymous at the first request for the last.")


if __name__ == "__main__":
    main()
