"""Our measuring client and others against a server whose token times are known: accuracy, cost, rates, claims and faults, in one run.

Server and clients have a core each. Repetitions are interleaved, ratios are of one repetition, tables show medians and quartiles.
`--memory` streams ten million tokens instead and prints the memory of our client.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import psutil

from benchmarks.loadgen import faults
from benchmarks.loadgen.claims import claims, claims_table
from benchmarks.loadgen.clients import COMMAND, Client, Shape, clients, driven, make_tokenizer
from benchmarks.loadgen.rig import CLIENT_CORE, SERVER_CORE, Run, percentile, run, serving
from vllm_repro.verdict.throughput import Spread

Found = dict[str, dict[str, list[float]]]
"""By figure and client: one value a repetition."""
PEERS = ("httpx", "openai", "vllm bench serve", "inference-perf")
VLLM = ("vllm bench serve",)
COMMANDS = ("vllm bench serve", "inference-perf")
STREAMS = {"ours": 3000, "bare": 3000, "vllm bench serve": 2000, "httpx": 300}
"""Requests of 500 tokens, 16 a send. Those of the other clients would take minutes."""
REQUESTS = {"ours": 20_000, "bare": 20_000, "vllm bench serve": 6000, "inference-perf": 2000}
FEW_REQUESTS = 1000


@dataclass(frozen=True)
class Axis:
    """A figure, and the ratio that ours must have to that of the best of `peers`. of: the client that is ours here."""

    figure: str
    title: str
    must: float
    stretch: float
    peers: Sequence[str] = PEERS
    of: str = "ours"
    higher: bool = False

    def best(self, found: Found) -> str | None:
        """Return the peer with the best median."""
        known = {name: median(found[self.figure][name]) for name in self.peers if found[self.figure].get(name)}
        return (max if self.higher else min)(known, key=lambda name: known[name]) if known else None


AXES = (
    Axis("ttft_p50", "TTFT error p50, 128 streams, ms", 1.0, 0.4),
    Axis("ttft_p99", "TTFT error p99, 128 streams, ms", 0.5, 0.2),
    Axis("itl_mean", "ITL error mean, 128 streams, ms", 1.0, 0.25),
    Axis("itl_p99", "ITL error p99, 128 streams, ms", 0.5, 0.2),
    Axis("cpu", "CPU s per million tokens, one a send, 100 a request", 1.0, 0.7, VLLM),
    Axis("cpu_request", "CPU s per 10,000 requests, without their tokens", 1.0, 0.7, peers=()),  # ours is near 0
    Axis("cpu_token", "CPU s per million tokens, without their requests", 1.0, 0.7, VLLM),
    Axis("tok_s", "tok/s of one core, 16 events a send", 1.0, 1.2, VLLM, higher=True),
    Axis("req_s", "requests/s, 1 token, 32 streams", 2.0, 8.0, higher=True),
    Axis("startup", "start-up of the command to its first request, s", 0.15, 0.1, COMMANDS, of=COMMAND),
    Axis("memory", "memory of the command, MiB", 0.15, 0.1, COMMANDS, of=COMMAND),
)


def measured(found: Found, name: str, client: Client, *, streams: int, requests: int) -> None:
    """Run the loads of one client once, and add its figures."""

    def add(figure: str, value: float) -> None:
        found.setdefault(figure, {}).setdefault(name, []).append(value)

    if name == COMMAND:
        ran = run(client, Shape(1, 1))
    else:
        ran = run(client, Shape(streams, requests))
        ttft, itl = ran.ttft_errors(), ran.itl_errors()
        if len(ttft) != requests:
            raise RuntimeError(f"{name}: {len(ttft)} of {requests} requests have a match: {ran.output[-1000:]}")
        add("ttft_p50", 1000 * percentile(ttft, 0.5))
        add("ttft_p99", 1000 * percentile(ttft, 0.99))
        add("itl_mean", 1000 * fmean(itl))
        add("itl_p99", 1000 * percentile(itl, 0.99))
        add("cpu", short := ran.cpu_per_million())
        # The cost of a token by answers five times as long, and what is left is the request's.
        long = run(client, Shape(streams, requests, 500))
        _check(name, long)
        add("cpu_token", token := (5 * long.cpu_per_million() - short) / 4)
        add("cpu_request", short - token)
    _check(name, ran)
    add("startup", ran.startup_s)
    add("memory", ran.mib)


def rates(found: Found, name: str, client: Client, share: float) -> None:
    """Run one client as fast as it can, and add its rates. share: of the usual number of requests."""
    if name in STREAMS:
        ran = run(client, Shape(32, int(STREAMS[name] * share), 500, light=True), server={"burst": 16})
        _check(name, ran)
        found.setdefault("tok_s", {}).setdefault(name, []).append(500 * ran.requests_per_s())
    ran = run(client, Shape(32, int(REQUESTS.get(name, FEW_REQUESTS) * share), 1, light=True), server={"burst": 1})
    _check(name, ran)
    found.setdefault("req_s", {}).setdefault(name, []).append(ran.requests_per_s())


def _check(name: str, ran: Run) -> None:
    if ran.status:
        raise RuntimeError(f"{name} ended with status {ran.status}: {ran.output[-1000:]}")


def _spread(values: Sequence[float]) -> str:
    one = Spread.of(values)
    return f"{_round(one.median)} ({_round(one.low)}..{_round(one.high)})"


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def goals_table(found: Found) -> str:
    """Return the table of ratios to the best peer."""
    lines = ["| axis | ours | best peer | ratio | must | stretch |", "|---|---|---|---|---|---|"]
    for axis in AXES:
        best = axis.best(found) if axis.figure in found else None
        ours = found.get(axis.figure, {}).get(axis.of)
        if best is None or ours is None:
            continue
        theirs = found[axis.figure][best]
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        middle, sign = median(ratios), 1 if axis.higher else -1
        met = (
            "stretch"
            if sign * middle >= sign * axis.stretch
            else "met"
            if sign * middle >= sign * axis.must
            else "**missed**"
        )
        lines.append(
            f"| {axis.title} | {_spread(ours)} | {best}: {_spread(theirs)} | {_spread(ratios)}: {met} | {axis.must:g} | {axis.stretch:g} |"
        )
    return "\n".join(lines)


def figures_table(found: Found, names: Sequence[str]) -> str:
    """Return the table of all figures of all clients."""
    lines = ["| figure | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for axis in AXES:
        rows = found.get(axis.figure, {})
        cells = [_spread(rows[name]) if name in rows else "" for name in names]
        lines.append(f"| {axis.title.replace(' of the command', '')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def memory(tokens: int) -> None:
    """Stream tokens, 16 a send, and print the memory of our client at each million."""
    with (
        tempfile.TemporaryDirectory(prefix="vllm-repro-loadgen-") as name,
        serving(Path(name), {"burst": 16}) as (url, _),
    ):
        words = driven("ours").argv(Shape(32, tokens // 500, 500, light=True), url, Path(name))
        os.sched_setaffinity(0, {CLIENT_CORE})
        sys.exit(os.spawnv(os.P_WAIT, words[0], words))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="repetitions of each client")
    parser.add_argument("--clients", metavar="A,B", help="only these")
    parser.add_argument(
        "--quick", action="store_true", help="see in a minute that all works: ours and bare, small loads"
    )
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--memory", action="store_true", help="stream ten million tokens through our client instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    given = parser.parse_args()
    if given.memory:
        memory(10_000_000)
    os.sched_setaffinity(0, {SERVER_CORE})  # the rig must not disturb the client
    began, busy, own = time.monotonic(), _busy(), _own()
    with tempfile.TemporaryDirectory(prefix="vllm-repro-loadgen-") as name:
        known, missing = clients(make_tokenizer(Path(name) / "tokenizer"))
        wanted = given.clients.split(",") if given.clients else ["ours", "bare"] if given.quick else list(known)
        chosen = {name: client for name, client in known.items() if name in wanted}
        found: Found = {}
        for turn in range(1 if given.quick else given.rounds):
            for name, client in list(chosen.items())[:: -1 if turn % 2 else 1]:
                many = 16 if given.quick else 128
                measured(found, name, client, streams=many, requests=3 * many)
                if name != COMMAND:
                    rates(found, name, client, 0.2 if given.quick else 1.0)
            print(f"repetition {turn + 1} is done after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        claimed = claims(chosen[COMMAND]) if COMMAND in chosen else []
        broken = faults.measure(chosen) if not (given.quick or given.no_faults) else {}
    wall = time.monotonic() - began
    others = (_busy() - busy - (_own() - own)) / wall
    print(_report(found, list(chosen), claimed, broken, missing))
    print(f"\n{wall:.0f} s; other processes used {others:.2f} cores. Load average {os.getloadavg()[0]:.1f} at the end.")
    if given.json:
        whole = {
            "figures": found,
            "claims": claimed,
            "faults": broken,
            "missing": missing,
            "wall_s": wall,
            "others": others,
        }
        given.json.write_text(json.dumps(whole, indent=1))


def _report(
    found: Found,
    names: Sequence[str],
    claimed: Sequence[Mapping[str, float]],
    broken: Mapping[str, Mapping[str, Mapping[str, object]]],
    missing: Sequence[str],
) -> str:
    n = max(len(values) for rows in found.values() for values in rows.values())
    parts = [f"### Load generators, n = {n}: median (quartiles)", goals_table(found), figures_table(found, names)]
    if claimed:
        parts.append(claims_table(claimed))
    if broken:
        parts.append(faults.table(broken))
    parts += [f"Not measured: {why}." for why in missing]
    return "\n\n".join(parts)


def _busy() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _own() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    main()
