from __future__ import annotations

import io
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.diagnosis.recordings import DATA
from vllm_repro.diagnosis.access_runs import AccessRuns
from vllm_repro.diagnosis.diagnosis import Diagnosis, diagnose
from vllm_repro.diagnosis.log_text import read_lines

LOGS = sorted((*(DATA / "recordings").glob("*.log"), *(DATA / "pasted").glob("*.txt")))
STATS = (
    "INFO 11-20 08:24:30 [loggers.py:257] Engine 000: Avg prompt throughput: {0}.0 tokens/s, Avg generation throughput: {0}.0 tokens/s, "
    "Running: 2 reqs, Waiting: 0 reqs, GPU KV cache usage: 0.1%"
)
OTHERS = (
    'INFO:     10.0.0.1:99 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error',
    'INFO:     10.0.0.1:99 - "GET /health HTTP/1.1" 503 Service Unavailable',
    'INFO:     10.0.0.1:99 - "POST /x?enforce_eager=True HTTP/1.1" 200 OK',
    "ERROR 11-20 08:24:30 [serving.py:9] EngineDeadError: EngineCore encountered an issue.",
    "Traceback (most recent call last):",
    '  File "/vllm/v1/engine/core.py", line 3, in step',
    "ValueError: no",
    "Killed",
)


def access_lines(chance: random.Random, prefixes: list[str], count: int) -> Iterator[str]:
    """Yield access lines, mostly of answers, with a few lines of other kinds between."""
    for _ in range(count):
        prefix, kind = chance.choice(prefixes), chance.random()
        if kind < 0.004:
            yield prefix + STATS.format(chance.choice((0, 7)))
        elif kind < 0.006:
            yield chance.choice((prefix, "")) + chance.choice(OTHERS)
        else:
            path = chance.choice(("GET /health", "GET /metrics")) if kind < 0.02 else "POST /v1/completions"
            yield f'{prefix}INFO:     10.0.0.{chance.randrange(256)}:{chance.randrange(65536)} - "{path} HTTP/1.1" 200 OK'


def padded(path: Path, chance: random.Random) -> bytes:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    own = sorted(set(re.findall(r"^\(APIServer pid=\d+\) ", "\n".join(lines), re.MULTILINE)))
    prefixes = chance.choice((own or [""], [*own, ""], [*own, "(APIServer pid=4242) "]))
    places = sorted(chance.randrange(len(lines) + 1) for _ in range(3))
    for place in reversed(places):
        lines[place:place] = access_lines(chance, prefixes, chance.choice((30, 500, 1500)))
    return chance.choice(("\n", "\n", "\r\n")).join(lines).encode()


def skipping(log: bytes) -> Diagnosis:
    return diagnose(io.BufferedReader(io.BytesIO(log)))


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_log_with_skipped_runs_has_the_same_diagnosis(path: Path) -> None:
    for seed in range(2):
        log = padded(path, random.Random(f"{path.stem} {seed}"))
        assert skipping(log) == diagnose(log), seed


def test_a_run_is_skipped_but_for_its_first_and_last_lines() -> None:
    line = '(APIServer pid=9) INFO:     10.0.0.1:99 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    runs = AccessRuns()
    seen = []
    for read in read_lines(io.BufferedReader(io.BytesIO(line.encode() * 200_000 + b"end\n")), runs):
        seen.append(read.number)
        runs.skip({"(APIServer pid=9) INFO:     "})
    assert len(seen) < 500
    assert seen[-4:] == [199_998, 199_999, 200_000, 200_001]
    assert runs.lines == 200_001 - len(seen)


@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, (1 << 23) + 7])
def test_a_long_line_is_cut_as_without_skipping(size: int) -> None:
    log = b"a" * size + b"\nlast"
    of_file = [(line.number, line.text) for line in read_lines(io.BufferedReader(io.BytesIO(log)))]
    assert of_file == [(line.number, line.text) for line in read_lines(log)]
