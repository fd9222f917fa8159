"""Claimed over true tokens per second, by the rounds of a real `vllm-repro run --throughput`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby

import msgspec

from benchmarks.loadgen.clients import Client, Shape
from benchmarks.loadgen.rig import run
from vllm_repro.verdict.throughput import Point, Round, Spread

TOKENS = 100
"""Of an answer in the scenario's load."""


def claims(command: Client) -> list[dict[str, float]]:
    """Run the command once. Return of each round its streams, the claimed and the true rate, whether it is withheld, and the cost."""
    ran = run(command, Shape(1, 1), limit=300, extra=["--throughput"])
    events = [json.loads(line) for line in ran.output.splitlines() if line.startswith("{")]
    rounds = [one for one in events if one["event"] == "throughput-round"]
    points = [one for one in events if one["event"] == "throughput-point"]
    warm_ups = {(one["point"]["concurrency"], one["again"]): one["warm_ups"] for one in points}
    true = iter(sorted((one for one in ran.record if one["asked"] == TOKENS), key=lambda one: one["got"]))
    found = []
    for (streams, again), ones in groupby(rounds, lambda one: (one["point"]["concurrency"], one["again"])):
        for _ in range(warm_ups[streams, again] * streams):
            next(true)
        for one in ones:
            served = [next(true) for _ in range(streams)]
            took = max(each["times"][-1] for each in served) - served[0]["got"]
            figures, point = msgspec.convert(one["figures"], Round), msgspec.convert(one["point"], Point)
            rates = {"claimed": figures.output_tok_s, "true": streams * TOKENS / took}
            withheld = {"withheld": bool(figures.limited or figures.late(point))}
            cost = {name: getattr(figures, name) for name in ("cpu", "late_s", "edge_s", "queued_s")}
            found.append({"streams": streams, "again": again, **rates, **withheld, **cost})
    if next(true, None) is not None:
        raise RuntimeError(f"the server served more rounds than the journal has: {ran.output[-1000:]}")
    return found


def claims_table(found: Sequence[Mapping[str, float]]) -> str:
    """Return the Markdown table."""
    lines = [
        "| streams | claimed over true tok/s | rounds | withheld | the others off by at most | client's share of a core |",
        "|---|---|---|---|---|---|",
    ]
    for streams in dict.fromkeys(one["streams"] for one in found):
        ones = [one for one in found if one["streams"] == streams]
        ratios, cpu = Spread.of([one["claimed"] / one["true"] for one in ones]), Spread.of([one["cpu"] for one in ones])
        withheld = sum(one["withheld"] for one in ones)
        off = max((abs(one["claimed"] / one["true"] - 1) for one in ones if not one["withheld"]), default=0.0)
        claimed = f"{ratios.median:.4f} ({ratios.low:.4f}..{ratios.high:.4f})"
        lines.append(f"| {streams} | {claimed} | {len(ones)} | {withheld} | {100 * off:.2f} % | {cpu.median:.2f} |")
    return "\n".join(lines)
