"""Growth of `diagnose` with the size of a log, and of `history` with the number of nights: processor time, and memory of the first.

The log: requests at a steady rate, `/health` and a count of tokens every ten seconds, as the API server of vLLM 0.28 prints them.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.history.made import row

from vllm_repro.history.bug_state import bug_histories

SERVER = "(APIServer pid=9) "
COUNTS = (
    "INFO 11-{:02} {:02}:{:02}:{:02} [loggers.py:257] Engine 000: Avg prompt throughput: 812.4 tokens/s, Avg generation throughput: "
    "512.3 tokens/s, Running: 12 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.2%, Prefix cache hit rate: 0.0%"
)


def write_log(path: Path, size: int, rate: int) -> None:
    """Write `size` bytes of a log with `rate` requests a second."""
    chance, written, second = random.Random(1), 0, 0
    with path.open("wb") as file:
        while written < size:
            lines = [COUNTS.format(1 + second // 86_400, second // 3600 % 24, second // 60 % 60, second % 60)]
            lines.append('INFO:     10.0.0.9:4711 - "GET /health HTTP/1.1" 200 OK')
            for _ in range(10 * rate):
                client = f"10.0.{chance.randrange(256)}.{chance.randrange(256)}:{chance.randrange(1024, 65536)}"
                lines.append(f'INFO:     {client} - "POST /v1/chat/completions HTTP/1.1" 200 OK')
            written += file.write("".join(f"{SERVER}{line}\n" for line in lines).encode())
            second += 10


def diagnosed(path: Path) -> tuple[float, float]:
    """Return the processor seconds of `vllm-repro diagnose`, and its most resident MiB."""
    words = [sys.executable, "-m", "vllm_repro", "diagnose", str(path)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as command:
        _, status, used = os.wait4(command.pid, 0)
        command.returncode = os.waitstatus_to_exitcode(status)
    if command.returncode:
        raise RuntimeError(f"vllm-repro diagnose exited with {command.returncode}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def counted(nights: int) -> float:
    """Return the processor seconds of a history of `nights`, each with its own nightly of a flaky bug."""
    chance = random.Random(1)
    rows = [row(night, chance.randrange(4), 3) for night in range(nights)]
    began = time.process_time()
    bug_histories(rows)
    return time.process_time() - began


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=3, metavar="N", help="measurements of each")
    parser.add_argument("--mb", type=int, nargs="+", default=[10, 100, 1000], metavar="MB", help="sizes of logs")
    given = parser.parse_args()
    print(
        f"\n### `diagnose`, n = {given.n}\n\n| MB | requests/s | processor s: median (min..max) | MiB |\n|---|---|---|---|"
    )
    for size in given.mb:
        for rate in (1, 20):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "server.log"
                write_log(path, size * 1_000_000, rate)
                seconds, memory = zip(*(diagnosed(path) for _ in range(given.n)), strict=True)
            print(f"| {size:,} | {rate} | {spread(seconds)} | {max(memory):.0f} |", flush=True)
    print(f"\n### `history`, n = {given.n}\n\n| nights | processor s: median (min..max) | exponent |\n|---|---|---|")
    before = 0.0
    for nights in (365, 730, 1460, 2920):
        times = [counted(nights) for _ in range(given.n)]
        exponent = f"{math.log2(statistics.median(times) / before):.1f}" if before else ""
        before = statistics.median(times)
        print(f"| {nights:,} | {spread(times)} | {exponent} |", flush=True)


if __name__ == "__main__":
    main()
