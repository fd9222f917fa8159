"""Measured ratios of throughput against a known truth, on real vLLM on this CPU.

Two arms sleep in each step of EngineCore, 2 ms and 20 % of the step, and log how long. With the
baseline's time per step that gives the true ratio. A fourth arm equals the baseline: two boots of
it and two of the baseline must show no difference.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from vllm_repro.conversion import convert
from vllm_repro.journal.journal import read
from vllm_repro.resources import scenario_folder
from vllm_repro.verdict.throughput import Ratio, Round, ThroughputChange, ratio

ANSWER, SEED, PAIRS = 128, 1, 20
STEP = "        outputs, model_executed = self.step_fn()\n"
SLOWED = (
    "        began = time.perf_counter()\n" + STEP + "        ended = time.perf_counter()\n"
    "        time.sleep({seconds})\n"
    "        slept, steps = getattr(self, '_slept', (0.0, 0))\n"
    "        self._slept = slept + time.perf_counter() - ended, steps + 1\n"
    "        if self._slept[1] % 64 == 0:\n"
    "            logger.info('REPRO slept %.6f s in %d steps', *self._slept)\n"
)
SLEEPS = {"two-ms": "0.002", "fifth": "0.2 * (ended - began)"}
_SLEPT = re.compile(r"REPRO slept ([\d.]+) s in (\d+) steps")

Boots = Sequence[Sequence[Round]]


def scenario(folder: Path) -> Path:
    """Write the scenario: min-tokens-stop-ids with these arms, for a release without the bug."""
    text = (scenario_folder() / "min_tokens_stop_ids.py").read_text(encoding="utf-8")
    text = text.replace("min-tokens-stop-ids", "throughput-truth")
    text = text.replace("--enforce-eager\n", "--enforce-eager\n        --no-async-scheduling\n")
    slowed = "".join(
        f'        arm("{name}", lives, patched("vllm/v1/engine/core.py", was={STEP!r},'
        f" now={SLOWED.format(seconds=seconds)!r})),\n"
        for name, seconds in SLEEPS.items()
    )
    arms = (
        '    arms=[\n        arm("reported", dies),\n'
        '        arm("equal", lives, with_flags("--uvicorn-log-level info")),\n'
        f"{slowed}    ],\n"
        f'    throughput=throughput(prompt=128, output={ANSWER}, baseline="reported"),\n'
    )
    path = folder / "throughput_truth.py"
    begin, end = text.index("    arms=["), text.index("    related=")
    path.write_text(text[:begin] + arms + text[end:], encoding="utf-8")
    return path


def measured(folder: Path) -> dict[str, Boots]:
    """Return the rounds of each boot by arm."""
    rounds: defaultdict[str, defaultdict[int, list[Round]]]
    rounds = defaultdict(lambda: defaultdict(list))
    for entry in read(folder / "journal.jsonl").of("throughput-round"):
        rounds[entry["arm"]][entry["trial"]].append(convert(entry["figures"], Round))
    return {arm: list(boots.values()) for arm, boots in rounds.items()}


def truth(folder: Path, arm: str, baseline: Boots) -> float:
    """Return the true ratio of an arm, from the sleep per step that its servers logged."""
    last = [
        _SLEPT.findall(log.read_text(encoding="utf-8"))[-1]
        for log in (folder / "logs").glob(f"{arm}-*.log")
    ]
    slept = sum(float(seconds) for seconds, _ in last) / sum(int(steps) for _, steps in last)
    step = median(one.wall_s for boot in baseline for one in boot) / ANSWER
    return step / (step + slept)


def pairs(arm: Boots, baseline: Boots) -> list[Ratio]:
    """Return the ratios of `PAIRS` draws of two boots of each arm."""
    every = list(product(combinations(arm, 2), combinations(baseline, 2)))
    drawn = random.Random(SEED).sample(every, min(PAIRS, len(every)))
    return [ratio(ours, theirs, SEED) for ours, theirs in drawn]


def main(arguments: argparse.Namespace) -> None:
    """Run the scenario, unless a finished run is named, and print the table."""
    folder = arguments.run
    if folder is None:
        with TemporaryDirectory() as scratch:
            words = ("run", str(scenario(Path(scratch))), "--server", "process", "--expect", "any")
            more = (
                "--vllm",
                "0.33.0",
                "--trials",
                str(arguments.boots),
                "--throughput",
                "--arm",
                "all",
            )
            command = [sys.executable, "-m", "vllm_repro", *words, *more, "--out", arguments.out]
            subprocess.run(command, check=True)
        folder = Path(arguments.out) / "throughput-truth" / "latest"
    boots = measured(folder)
    print("| arm | ratio, 95 % interval | truth | inside | boots |\n|---|---|---|---|---|")
    for arm in ("equal", *SLEEPS):
        found = ratio(boots[arm], boots["reported"], SEED)
        true = 1.0 if arm == "equal" else truth(folder, arm, boots["reported"])
        inside = "yes" if found.low <= true <= found.high else "no"
        print(
            f"| {arm} | {found.ratio:.3f} ({found.low:.3f} to {found.high:.3f}) | {true:.3f}"
            f" | {inside} | {found.boots} |"
        )
    changes = [found.change for found in pairs(boots["equal"], boots["reported"])]
    print(
        f"\nno difference in {changes.count(ThroughputChange.NONE)} of {len(changes)} equal pairs"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--boots", type=int, default=5)
    parser.add_argument("--out", default="reports/truth")
    parser.add_argument("--run", type=Path, help="read this finished run")
    main(parser.parse_args())
