"""Our measuring client, a bare one and `vllm bench serve`, on a server with known token times.

Server and clients have a core each. Repetitions are interleaved; the table shows medians and
ranges.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import fmean

from benchmarks.loadgen.rig import VLLM, Run, Shape, driven, run, vllm_bench
from benchmarks.overhead import spread

FIGURES: dict[str, Callable[[Run], float]] = {
    "TTFT error p50, ms": lambda ran: 1000 * _percentile(ran.ttft_errors(), 0.5),
    "TTFT error p99, ms": lambda ran: 1000 * _percentile(ran.ttft_errors(), 0.99),
    "ITL error mean, ms": lambda ran: 1000 * fmean(ran.itl_errors()),
    "ITL error p99, ms": lambda ran: 1000 * _percentile(ran.itl_errors(), 0.99),
    "processor s, with the start": lambda ran: ran.cpu_s,
}


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="repetitions of each client"
    )
    parser.add_argument("--streams", type=int, default=16, metavar="N")
    parser.add_argument(
        "--requests", type=int, default=160, metavar="N", help="of each run, 100 tokens each"
    )
    given = parser.parse_args()
    clients = {"ours": driven("ours"), "bare": driven("bare")}
    if (peer := vllm_bench()) is None:
        print(
            f"not measured: vLLM {VLLM} is not in the cache; a `vllm-repro run --vllm {VLLM}`"
            " installs it"
        )
    else:
        clients["vllm bench serve"] = peer
    runs: dict[str, list[Run]] = {name: [] for name in clients}
    for _ in range(given.rounds):
        for name, client in clients.items():
            runs[name].append(run(client, Shape(given.streams, given.requests)))
    print(f"\n### {given.streams} streams, n={given.rounds}: median (min..max)\n")
    print(f"| figure | {' | '.join(runs)} |\n|---{'|---' * len(runs)}|")
    for title, figure in FIGURES.items():
        print(
            "|",
            title,
            *(f"| {spread([figure(ran) for ran in some], 3)}" for some in runs.values()),
            "|",
        )


if __name__ == "__main__":
    main()
