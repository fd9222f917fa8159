"""Claimed over true tokens per second, by the rounds of a real `vllm-repro run --throughput`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby

from benchmarks.loadgen.clients import Client, Shape
from benchmarks.loadgen.rig import run
from vllm_repro.verdict.throughput import MOST_CPU, WARM_UPS, Spread

TOKENS = 100
"""Of an answer in the scenario's load."""


def claims(command: Client) -> list[dict[str, float]]:
    """Run the command once. Return of each round its streams, the claimed and the true rate, and the command's share of a core."""
    ran = run(command, Shape(1, 1), limit=300, extra=["--throughput"])
    events = [json.loads(line) for line in ran.output.splitlines() if line.startswith("{")]
    rounds = [one for one in events if one["event"] == "throughput-round"]
    true = iter(sorted((one for one in ran.record if one["asked"] == TOKENS), key=lambda one: one["got"]))
    found = []
    for (streams, again), ones in groupby(rounds, lambda one: (one["point"]["concurrency"], one["again"])):
        for _ in range(WARM_UPS * streams):
            next(true)
        for one in ones:
            served = [next(true) for _ in range(streams)]
            took = max(each["times"][-1] for each in served) - served[0]["got"]
            figures = one["figures"]
            rates = {"claimed": figures["output_tok_s"], "true": streams * TOKENS / took}
            found.append(
                {"streams": streams, "again": again, **rates, "cpu": figures["cpu"], "late_s": figures["late_s"]}
            )
    if next(true, None) is not None:
        raise RuntimeError(f"the server served more rounds than the journal has: {ran.output[-1000:]}")
    return found


def claims_table(found: Sequence[Mapping[str, float]]) -> str:
    """Return the Markdown table."""
    lines = [
        "| streams | claimed over true tok/s | rounds | withheld | client's share of a core |",
        "|---|---|---|---|---|",
    ]
    for streams in dict.fromkeys(one["streams"] for one in found):
        ones = [one for one in found if one["streams"] == streams]
        ratios, cpu = Spread.of([one["claimed"] / one["true"] for one in ones]), Spread.of([one["cpu"] for one in ones])
        withheld = sum(one["cpu"] > MOST_CPU for one in ones)
        lines.append(
            f"| {streams} | {ratios.median:.4f} ({ratios.low:.4f}..{ratios.high:.4f}) | {len(ones)} | {withheld} | {cpu.median:.2f} |"
        )
    return "\n".join(lines)
