"""What does it cost to render a huge run? Time and memory of each format, over the number of trials and the size of the logs.

The journals are made: the trials of the rehearsal example, over and over, each with rounds of throughput and answers to the output check
where its engine lived. No server runs. Every figure is of a process of its own that reads the journal and renders one format, interpreter
start included; its memory is the kernel's own peak of resident pages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[1] / "reports" / "examples" / "tq-chunked-prefill-rehearsal" / "journal.jsonl"
TRIALS = (10, 100, 1_000, 10_000)
LOGS_MB = (1, 10, 100, 1_000)
BASELINE = "eager"
POINT = {"prompt": 128, "output": 512, "concurrency": 4}

RENDERED = """
import resource, sys
from pathlib import Path
from vllm_repro.report.build import build
from vllm_repro.report.files import pieces, write_whole
write_whole(Path(sys.argv[3]), pieces(build(Path(sys.argv[1])), sys.argv[2]), hint="")
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, Path(sys.argv[3]).stat().st_size)
"""


@dataclass(frozen=True)
class Cost:
    """seconds: of the processor, for other load would blur the clock's. peak, output: bytes."""

    seconds: float
    peak: int
    output: int


# ── journals ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def entries(trials: int) -> Iterator[dict[str, Any]]:
    """A journal of so many trials, spread over the arms of the example, as a run writes it."""
    lines = [json.loads(line) for line in EXAMPLE.read_text(encoding="utf-8").splitlines()]
    head = next(entry for entry in lines if entry["event"] == "run-started")
    load = {"prompt": 128, "output": 512, "concurrency": [4], "rounds": 3, "baseline": BASELINE}
    checks = {"longest_run": 20, "same": 4, "baseline": BASELINE, "tokens": 32}
    head |= {"wishes": {"throughput": True, "soak": 0.0}, "loads": [load], "output": checks}
    yield head
    # Sorted by their arms, so that the trials of one arm come together as a block each.
    blocks = [
        [entry for entry in lines if entry.get("arm") == arm["name"] and entry.get("trial") == 1]
        for arm in head["arms"]
    ]
    moment = head["t"]
    for number in range(trials):
        block, trial = blocks[number % len(blocks)], number // len(blocks) + 1
        for entry in _trial(block, trial, number):
            moment += 0.01
            yield {**entry, "t": round(moment, 6)}
    yield {"t": round(moment + 1, 6), "event": "run-ended", "interrupted": None}


def _trial(block: Sequence[dict[str, Any]], trial: int, number: int) -> Iterator[dict[str, Any]]:
    alive = any(entry["event"] == "trial-ended" and entry["death"] is None for entry in block)
    for entry in block:
        arm = entry["arm"]
        if entry["event"] == "trial-ended":
            if alive:
                yield from _measured(arm, trial, number)
            # Each has a log of its own, and dies in words of its own, as engines do.
            entry = {**entry, "log": f"logs/{arm}-{trial}.log"}
            if entry["death"]:
                entry["death"] = {**entry["death"], "message": f"{entry['death']['message']} (pid={10_000 + number})"}
        yield {**entry, "trial": trial}


def _measured(arm: str, trial: int, number: int) -> Iterator[dict[str, Any]]:
    label = {"arm": arm, "trial": trial}
    said = {"length": 32, "sha256": "0" * 64, "first": list(range(32)), "longest_run": 1, "distinct": 1.0}
    for probe in ("greedy", "beginning"):
        yield {"event": "output", **label, "said": {"probe": probe, "found": None, "margins": [], **said}}
    for turn in range(3):
        speed = 100.0 + (number * 7 + turn) % 13
        figures = {
            "wall_s": 2048 / speed,
            "requests": 4,
            "prompt_tokens": 512,
            "output_tokens": 2048,
            "output_tok_s": speed,
            "req_s": speed / 512,
            "ttft_s": 0.1,
            "tpot_s": 4 / speed,
            "itl_s": 4 / speed,
            "itl_p99_s": 8 / speed,
        }
        yield {
            "event": "throughput-round",
            **label,
            "point": POINT,
            "round": turn + 1,
            "again": False,
            "figures": figures,
        }
    usage = {"prompt": 3584, "output": 14336}
    yield {
        "event": "throughput-point",
        **label,
        "point": POINT,
        "again": False,
        "rounds": 3,
        "usage": usage,
        "counted": usage,
    }


def make_journal(folder: Path, trials: int) -> int:
    """Writes it, and returns its size in bytes."""
    path = folder / "journal.jsonl"
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries(trials))
    return path.stat().st_size


def make_logs(folder: Path, megabytes: int) -> None:
    """One log of that size for the first trial that died; its traceback stands at the end, so that all of it is searched."""
    quiet = b"(EngineCore pid=9) INFO 11-20 08:24:30 [loggers.py:259] Engine 000: Avg generation throughput: 12.3 tokens/s\n"
    death = b'ERROR 11-20 08:24:30 [core.py:1138] Traceback (most recent call last):\n  File "a.py", line 1, in f\nAssertionError: x\n'
    block = quiet * (2**20 // len(quiet))
    (folder / "logs").mkdir(exist_ok=True)
    with (folder / "logs" / "reported-1.log").open("wb") as file:
        for _ in range(megabytes):
            file.write(block)
        file.write(death)


# ── figures ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def cost(folder: Path, form: str) -> Cost:
    """Of one process that renders `form`."""
    words = [sys.executable, "-c", RENDERED, str(folder), form, str(folder / f"out.{form}")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    seconds, peak, output = done.stdout.split()
    return Cost(float(seconds), int(peak), int(output))


def table(title: str, rows: Sequence[tuple[str, dict[str, Cost]]], forms: Sequence[str]) -> str:
    lines = [f"| {title} | " + " | ".join(forms) + " |", "|---" * (len(forms) + 1) + "|"]
    for name, costs in rows:
        cells = (
            f"{one.seconds:.1f} s, {one.peak / 2**20:,.0f} MB, {one.output / 1e3:,.0f} kB" for one in costs.values()
        )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    from vllm_repro.report.files import FORMATS, ON_REQUEST

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, nargs="+", default=TRIALS)
    parser.add_argument("--logs", type=int, nargs="+", default=LOGS_MB, metavar="MB")
    arguments = parser.parse_args()
    forms = [*FORMATS, *ON_REQUEST]
    with tempfile.TemporaryDirectory(prefix="rendering-") as name:
        folder = Path(name)
        rows = []
        make_logs(folder, 1)
        for trials in arguments.trials:
            size = make_journal(folder, trials)
            rows.append((f"{trials:,} ({size / 1e6:,.1f} MB)", {form: cost(folder, form) for form in forms}))
        print(table("trials (journal)", rows, forms), end="\n\n")
        rows = []
        make_journal(folder, 10)
        for megabytes in arguments.logs:
            make_logs(folder, megabytes)
            rows.append((f"{megabytes:,} MB", {form: cost(folder, form) for form in forms}))
        print(table("log (10 trials)", rows, forms))


if __name__ == "__main__":
    main()
