from __future__ import annotations

import io
import random
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.diagnosis.logs import DATA
from vllm_repro_diagnosis.access_runs import AccessRuns, kind_of
from vllm_repro_diagnosis.diagnosis import Diagnosis, diagnose
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_diagnosis.log_text import Line, read_lines

LOGS = sorted((*(DATA / "recordings").glob("*.log"), *(DATA / "pasted").glob("*.txt")))
STATS = (
    "INFO 11-20 08:24:{1:02} [loggers.py:257] Engine 00{2}: Avg prompt throughput: {0}.0 tokens/s, "
    "Avg generation throughput: {0}.0 tokens/s, Running: 2 reqs, Waiting: 0 reqs, "
    "GPU KV cache usage: 0.1%, Prefix cache hit rate: 0.0%"
)
STAMPS = (
    *(
        "",
        "",
        "2026-07-01T08:24:35.123456789Z ",
        "2026-07-01T08:24:35.1234Z stdout F ",
        "[2026-07-01 08:24:35] ",
    ),
    *("Jul  1 08:24:35 gpu-7 vllm[71]: ", "2026-07-01T08:24:35+0000 gpu-7 vllm[71]: "),
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
    """Yield access lines and counts of tokens, with a few lines of other kinds between."""
    counts, ordered = chance.choice((0.004, 0.3)), chance.random() < 0.5
    for number in range(count):
        prefix, kind = chance.choice(prefixes), chance.random()
        if kind < counts:
            second = number * 60 // count if ordered else chance.randrange(60)
            yield prefix + STATS.format(chance.choice((0, 7, 7, 7)), second, chance.randrange(2))
        elif kind < counts + 0.002:
            yield chance.choice((prefix, "")) + chance.choice(OTHERS)
        else:
            path = (
                chance.choice(("GET /health", "GET /metrics"))
                if kind < counts + 0.02
                else "POST /v1/completions"
            )
            client = f"10.0.0.{chance.randrange(256)}:{chance.randrange(65536)}"
            yield f'{prefix}INFO:     {client} - "{path} HTTP/1.1" 200 OK'


def padded(path: Path, chance: random.Random) -> bytes:
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    own = sorted(set(re.findall(r"^\(APIServer pid=\d+\) ", "\n".join(lines), re.MULTILINE)))
    prefixes = chance.choice((own or [""], [*own, ""], [*own, "(APIServer pid=4242) "]))
    places = sorted(chance.randrange(len(lines) + 1) for _ in range(3))
    for place in reversed(places):
        lines[place:place] = access_lines(chance, prefixes, chance.choice((30, 500, 1500)))
    stamp = chance.choice(STAMPS)
    lines = [stamp.replace("5", f"{number % 10}", 1) + line for number, line in enumerate(lines)]
    return chance.choice(("\n", "\n", "\r\n")).join(lines).encode()


def skipping(log: bytes) -> Diagnosis:
    return diagnose(io.BufferedReader(io.BytesIO(log)))


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_a_log_with_skipped_runs_has_the_same_diagnosis(path: Path) -> None:
    for seed in range(2):
        log = padded(path, random.Random(f"{path.stem} {seed}"))
        assert skipping(log) == diagnose(log), seed


ACCESS = '(APIServer pid=9) INFO:     10.0.0.1:99 - "POST /v1/completions HTTP/1.1" 200 OK'
COUNTS = "(APIServer pid=9) " + STATS.format(7, 30, 0)


STAMPED = [*map("".join, zip(STAMPS[2:], (ACCESS, COUNTS, ACCESS, ACCESS, COUNTS), strict=True))]


@pytest.mark.parametrize(
    "lines", [[ACCESS], [COUNTS], [ACCESS, COUNTS], *([line] for line in STAMPED)]
)
def test_a_run_is_skipped_but_for_its_first_and_last_lines(lines: list[str]) -> None:
    times = 200_000 // len(lines)
    log = "".join(line + "\n" for line in lines).encode() * times + b"end\n"
    runs, seen = AccessRuns(), list[Line]()
    for read in read_lines(io.BufferedReader(io.BytesIO(log)), runs):
        seen.append(read)
        runs.skip([kind for line in lines if (kind := kind_of(line))])
    assert len(seen) < 600
    assert [line.number for line in seen[-2:]] == [200_000, 200_001]
    assert runs.lines == runs.dropped == 200_001 - len(seen)
    stamped = sum(line.raw.endswith(COUNTS) for line in seen)
    assert len(runs.stamps) == (times - stamped if lines[-1].endswith(COUNTS) else 0)


@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, (1 << 23) + 7])
def test_a_long_line_is_cut_as_without_skipping(size: int) -> None:
    log = b"a" * size + b"\nlast"
    of_file = [(line.number, line.text) for line in read_lines(io.BufferedReader(io.BytesIO(log)))]
    assert of_file == [(line.number, line.text) for line in read_lines(log)]


BOOT = [
    "(APIServer pid=9) INFO 11-20 08:24:00 [api.py:1] vLLM API server version 0.28.0",
    "(EngineCore pid=10) INFO 11-20 08:24:01 [core.py:1] Initializing a V1 LLM engine (v0.28.0)",
    "(APIServer pid=9) INFO:     Application startup complete.",
]
DEATH = [
    "Traceback (most recent call last):",
    '  File "/vllm/v1/engine/core.py", line 3, in run_busy_loop',
    "ValueError: no",
]
HEALTH = ACCESS.replace("POST /v1/completions", "GET /health")
UNPREFIXED = ACCESS.removeprefix("(APIServer pid=9) ")
OF_ENGINE = ACCESS.replace("APIServer pid=9", "EngineCore pid=10")
BY_HAND = {
    "most lines are those of a server": ["prose"] * 3000 + [ACCESS] * 5000 + DEATH,
    "an exception goes on in access lines": (
        [OF_ENGINE] * 500
        + [f"(EngineCore pid=10) INFO:     {line}" for line in DEATH]
        + [OF_ENGINE] * 50
        + [
            (
                "(EngineCore pid=10) ERROR 11-20 08:24:30 [core.py:9] EngineCore encountered a fatal"
                " error."
            )
        ]
    ),
    "lines without a process, too many to keep": (
        [
            BOOT[0],
            STATS.format(7, 30, 0),
            *BOOT[1:],
            *DEATH,
        ]
        + [STATS.format(7, 30, 0)] * 15_000
    ),
    "the last count of an engine": (
        BOOT
        + [ACCESS, COUNTS] * 250
        + [COUNTS.replace("Running: 2", "Running: 0").replace("7.0", "0.0"), ACCESS, ACCESS]
    ),
    "counts outweigh a prefix": BOOT + [COUNTS] * 2000 + [f"0: {COUNTS}x"] * 900 + ["0: Killed"],
    "answers of /health after an unfinished traceback": (
        BOOT
        + [ACCESS] * 500
        + [f"(EngineCore pid=10) ERROR 11-20 08:24:30 [core.py:9] {line}" for line in DEATH[:2]]
        + [HEALTH] * 50
    ),
    "a collector's prefix that begins like an access line": (
        ['INFO:     10.0.0.1:99 - "(EngineCore pid=3) INFO 11-20 08:24:30 [x.py:1] hi'] * 5
        + ["prose"] * 500
        + [UNPREFIXED] * 2000
        + DEATH
    ),
}


LIFE = [*BOOT, *(f"(EngineCore pid=10) ERROR 11-20 08:24:30 [core.py:9] {line}" for line in DEATH)]
DEAD = [
    *LIFE,
    "(EngineCore pid=10) ERROR 11-20 08:24:30 [core.py:9] EngineCore encountered a fatal error.",
]


@pytest.mark.parametrize("life", [DEAD, BOOT], ids=["died", "silent"])
def test_memory_does_not_grow_with_the_number_of_lives(life: list[str]) -> None:
    def most(lives: int) -> int:
        log = "".join(f"{line}\n" for line in life).encode() * lives
        tracemalloc.start()
        diagnosis = skipping(log)
        peak = tracemalloc.get_traced_memory()[1] - len(log)
        tracemalloc.stop()
        assert diagnosis.died is (True if life is DEAD else None)
        return peak

    most(2)  # patterns are compiled once
    assert most(500) < most(50) + 1_000_000


def test_the_lives_after_a_death_count_only_as_evidence() -> None:
    lab = "(EngineCore pid=10) INFO 11-20 08:24:01 [lab.py:1] LAB observed store {}"
    log = "".join(
        f"{line}\n" for line in [*DEAD, *BOOT, *DEAD[:-4], lab, *(["noise"] * 9)] * 3
    ).encode()
    runs = skipping(log)
    assert (runs.died, runs.exception, runs.evidence) == (True, "ValueError", Evidence.LAB)
    assert runs == diagnose(log)


@pytest.mark.parametrize("name", BY_HAND)
def test_a_log_made_by_hand_has_the_same_diagnosis(name: str) -> None:
    log = "".join(line + "\n" for line in BY_HAND[name]).encode()
    assert skipping(log) == diagnose(log)
