"""Growth of `diagnose` with the size of a log, and of `history` with the number of nights: processor time, and memory of the first.

The logs: requests at a steady rate, `/health` and a count of tokens every ten seconds, as the API server of vLLM 0.28 prints them; the
same as `docker logs --timestamps` prints it; and a recorded boot and death, again and again. `grep -c` reads the same file.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from tests.nights.made import row

from vllm_repro_nights.bug_state import bug_state

DIAGNOSE = [sys.executable, "-m", "vllm_repro", "diagnose"]
SERVER = "(APIServer pid=9) "
COUNTS = (
    "INFO 11-{:02} {} [loggers.py:257] Engine 000: Avg prompt throughput: 812.4 tokens/s, Avg generation throughput: "
    "512.3 tokens/s, Running: 12 reqs, Waiting: 0 reqs, GPU KV cache usage: 1.2%, Prefix cache hit rate: 0.0%"
)


RECORDED = Path(__file__).parents[1] / "tests/data/recordings/v0.32.0-killed-worker.log"


def write_log(path: Path, size: int, rate: int, *, stamped: bool = False) -> None:
    """Write `size` bytes of a log with `rate` requests a second."""
    chance, written, second = random.Random(1), 0, 0
    with path.open("wb") as file:
        while written < size:
            day, clock = 1 + second // 86_400, f"{second // 3600 % 24:02}:{second // 60 % 60:02}:{second % 60:02}"
            lines = [COUNTS.format(day, clock)]
            lines.append('INFO:     10.0.0.9:4711 - "GET /health HTTP/1.1" 200 OK')
            for _ in range(10 * rate):
                client = f"10.0.{chance.randrange(256)}.{chance.randrange(256)}:{chance.randrange(1024, 65536)}"
                lines.append(f'INFO:     {client} - "POST /v1/chat/completions HTTP/1.1" 200 OK')
            stamp = f"2026-11-{day:02}T{clock}.{chance.randrange(10**9):09}Z " if stamped else ""
            written += file.write("".join(f"{stamp}{SERVER}{line}\n" for line in lines).encode())
            second += 10


def write_crash_loop(path: Path, size: int) -> None:
    """Write `size` bytes of a server that boots and dies, two minutes apart."""
    recorded, life = RECORDED.read_text(encoding="utf-8"), 0
    with path.open("wb") as file:
        while file.tell() < size:
            day = f"{1 + life // 672:02}-{1 + life // 24 % 28:02} {life % 24:02}"
            file.write(re.sub(r"(?<= )\d\d-\d\d \d\d(?=:\d\d:\d\d )", day, recorded).encode())
            life += 1


LOGS: dict[str, Callable[[Path, int], None]] = {
    "1 request/s": partial(write_log, rate=1),
    "20 requests/s": partial(write_log, rate=20),
    "20 requests/s, stamped": partial(write_log, rate=20, stamped=True),
    "boots and deaths": write_crash_loop,
}


def used(*words: str) -> tuple[float, float]:
    """Return the processor seconds of a command, and its most resident MiB."""
    # To a pipe: `grep -c` stops at its first match if nobody reads.
    with subprocess.Popen(words, stdout=subprocess.PIPE) as command:
        _, status, spent = os.wait4(command.pid, 0)
        command.returncode = os.waitstatus_to_exitcode(status)
    subprocess.CompletedProcess(words, command.returncode).check_returncode()
    return spent.ru_utime + spent.ru_stime, spent.ru_maxrss / 1024


def counted(nights: int) -> float:
    """Return the processor seconds of a history of `nights`, each with its own nightly of a flaky bug."""
    chance = random.Random(1)
    rows = [row(night, chance.randrange(4), 3) for night in range(nights)]
    began = time.process_time()
    bug_state(rows)
    return time.process_time() - began


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", type=int, default=3, metavar="N", help="measurements of each")
    parser.add_argument("--mb", type=int, nargs="+", default=[10, 100, 1000], metavar="MB", help="sizes of logs")
    given = parser.parse_args()
    print(
        f"\n### `diagnose`, n = {given.n}\n\n| MB | log | processor s: median (min..max) | MB/s | to `grep -c` | MiB |"
    )
    print("|---|---|---|---|---|---|")
    for size, (name, write) in product(given.mb, LOGS.items()):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "server.log"
            write(path, size * 1_000_000)
            runs = [(used(*DIAGNOSE, str(path)), used("grep", "-c", "INFO", str(path))) for _ in range(given.n)]
        seconds = [ours for (ours, _), _ in runs]
        ratio = statistics.median(ours / grep for (ours, _), (grep, _) in runs)
        memory = max(memory for (_, memory), _ in runs)
        rate = size / statistics.median(seconds)
        print(f"| {size:,} | {name} | {spread(seconds)} | {rate:.0f} | {ratio:.1f} | {memory:.0f} |", flush=True)
    print(f"\n### `history`, n = {given.n}\n\n| nights | processor s: median (min..max) | exponent |\n|---|---|---|")
    before = 0.0
    for nights in (365, 730, 1460, 2920):
        times = [counted(nights) for _ in range(given.n)]
        exponent = f"{math.log2(statistics.median(times) / before):.1f}" if before else ""
        before = statistics.median(times)
        print(f"| {nights:,} | {spread(times)} | {exponent} |", flush=True)


if __name__ == "__main__":
    main()
