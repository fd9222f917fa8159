"""Throughput of the last night and of the night before, for each arm, load and host."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from statistics import median

from vllm_repro.report.json_report import ArmJson, PointJson
from vllm_repro.report.runs import Run
from vllm_repro.verdict.throughput import Point, withheld


@dataclass(frozen=True, kw_only=True)
class NightThroughput:
    """Output tokens a second of an arm at one load: medians over the boots of a night."""

    scenario: str
    arm: str
    load: str
    host: str
    # hardware and weights
    label: str
    night: date
    last: float
    # None without an earlier night of the same flags, hardware and weights
    before: float | None


def throughput(runs: Iterable[tuple[date, Run]]) -> list[NightThroughput]:
    """Return the newest throughput of each arm, load, host and setup, sorted.

    Runs whose evidence shows no throughput are left out. runs: with their nights.
    """
    figures: dict[tuple[str, str, Point, str, str, str], dict[date, list[float]]] = {}
    for night, run in runs:
        # an older report has no label
        label = (run.throughput and run.throughput.label) or run.hardware
        for arm in run.arms if not withheld(run.evidence) else ():
            for point in _points(arm):
                load = Point(point.prompt, point.output, point.concurrency)
                # figures of other flags are not compared
                key = run.scenario, arm.name, load, run.host, label, setup_of(arm)
                if point.output_tok_s is not None:
                    nights = figures.setdefault(key, {}).setdefault(night, [])
                    nights.append(point.output_tok_s)
    return [_last_two(*key[:5], nights) for key, nights in sorted(figures.items())]


def _points(arm: ArmJson) -> Iterator[PointJson]:
    """Yield the figures of all boots of an arm, also of the boot that only ran its load."""
    for boot in (*arm.trials, arm.load):
        if boot is not None and boot.throughput is not None:
            yield from boot.throughput.points


_OF_THIS_RUN = (
    "-p",
    "--publish",
    "--port",
    "--host",
    "--name",
    "--label",
    "--network",
    "--mount",
    "-v",
    "--volume",
)


def setup_of(arm: ArmJson) -> str:
    """Return a hash of an arm's command without the ports, paths, names and image of this run.

    Figures of two setups are not compared.
    """
    try:
        words = shlex.split(arm.command)
    except ValueError:
        words = arm.command.split()
    kept: list[str] = []
    skip = False
    for word in words:
        if skip or word.partition("=")[0] in _OF_THIS_RUN:
            skip = not skip and "=" not in word
        elif word != arm.server.image:
            # keep only the last name of a path
            kept.append(re.sub(r"(^|=)[~.$]?\w*/.*/", r"\1", word))
    text = "\n".join([str(arm.server.kind), *kept])
    return hashlib.blake2s(text.encode(), digest_size=4).hexdigest()


def _last_two(
    scenario: str, arm: str, load: Point, host: str, label: str, nights: dict[date, list[float]]
) -> NightThroughput:
    """Return the medians of the last night and of the one before it."""
    *earlier, last = sorted(nights)
    return NightThroughput(
        scenario=scenario,
        arm=arm,
        load=str(load),
        host=host,
        label=label,
        night=last,
        last=median(nights[last]),
        before=median(nights[earlier[-1]]) if earlier else None,
    )
