"""Log lines: prefixes, encodings, and skipped runs of access lines."""

from __future__ import annotations

import io
import json
import random
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.diagnosis.logs import DATA, recording
from vllm_repro_diagnosis.access_runs import AccessRuns, kind_of
from vllm_repro_diagnosis.diagnosis import Diagnosis, diagnose
from vllm_repro_diagnosis.evidence import Evidence
from vllm_repro_diagnosis.log_text import MAX_LINE, Line, read_lines


def read_line(text: str) -> Line:
    (line,) = read_lines(text)
    return line


@pytest.mark.parametrize(
    ("raw", "parts"),
    [
        (
            "(EngineCore_DP0 pid=7) INFO 11-20 08:24:30 [core.py:1] x",
            ("EngineCore_DP0", 7, "INFO", "core.py:1", "x"),
        ),
        (
            'ERROR 09-30 15:18:57 [v1/core.py:7]   File "a.py"',
            ("", None, "ERROR", "v1/core.py:7", '  File "a.py"'),
        ),
        ("INFO 05-01 10:00:00 core.py:55] old", ("", None, "INFO", "core.py:55", "old")),
        ("INFO 11-20 08:24:30.123 [core.py:1] x", ("", None, "INFO", "core.py:1", "x")),
        (
            "INFO:     Application startup complete.",
            ("", None, "INFO", "", "Application startup complete."),
        ),
        ("(APIServer pid=3) ERROR:    Exception", ("APIServer", 3, "ERROR", "", "Exception")),
        ("(Worker pid=4) RuntimeError: bare", ("Worker", 4, "", "", "RuntimeError: bare")),
        (
            "(RayWorker pid=8, ip=10.0.0.1) (EngineCore pid=5) INFO 11-20 08:24:30 [a.py:1] z",
            ("EngineCore", 5, "INFO", "a.py:1", "z"),
        ),
        ("(EngineCore_0 pid=5) (VllmWorker TP0 pid=7) y", ("VllmWorker", 7, "", "", "y")),
        ("(EngineCore_0 pid=5) (VllmWorker DP0 TP1 pid=7) y", ("VllmWorker", 7, "", "", "y")),
        ("[rank1]: Traceback", ("rank1", None, "", "", "Traceback")),
        ("[rank0]: (Worker pid=4) bare", ("Worker", 4, "", "", "bare")),
        ("just words", ("", None, "", "", "just words")),
    ],
)
def test_prefixes_of_vllm(raw: str, parts: tuple[str, int | None, str, str, str]) -> None:
    line = read_line(raw)
    assert (line.process, line.pid, line.level, line.source, line.text) == parts
    assert line.raw == raw


@pytest.mark.parametrize(
    "collector",
    [
        "vllm-1  | {}",
        "2026-11-20T08:24:30.123456789+00:00 {}",
        "2026-11-20T08:24:30.123456789Z stderr F {}",
        "[2026-11-20 08:24:30] {}",
        "vllm-head-1 | 2026-11-20T08:24:30.1Z {}",
        "Nov 20 08:24:30.123456 gpu-host vllm[123]: {}",
        "2026-11-20T08:24:30+0000 gpu-host vllm[123]: {}",
        "2026-11-20 08:24:30.123\t{}",
        "[pod/vllm-0/server] {}",
        "> > {}",
        ">     {}",
        "\t{}",
        "\x1b[1;36m{}\x1b[0m\r",
        "[31m{}[0m",
        "^[[1;36m{}^[[0m",
        "#033[1;36m{}#033[0m",
        "\\x1b[1;36m{}\\x1b[0m",
        "\\u001b[1m{}",
        "\\033[K{}",
        "\x1b_bk;t=1795345636000\x07{}",
        "^C{}",
        "{} [repeated 7x across cluster] (Ray deduplicates logs by default.)",
    ],
)
def test_known_collectors_are_removed(collector: str) -> None:
    bare = "(EngineCore pid=5) ERROR 11-20 08:24:30 [core.py:1138]     raise AssertionError("
    line = read_line(collector.format(bare))
    parts = (line.process, line.pid, line.level, line.source)
    assert parts == ("EngineCore", 5, "ERROR", "core.py:1138")
    assert line.text == "    raise AssertionError("


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("[1;36m(APIServer pid=9627)[0;0m INFO 11-20 08:24:30 [a.py:1] x", "x"),
        ("rate(requests[5m]) and a[10] stay", "rate(requests[5m]) and a[10] stay"),
        # Indentation without a vLLM prefix stays.
        ("    raise AssertionError(", "    raise AssertionError("),
        (">     raise AssertionError(", "    raise AssertionError("),
        ("2026-11-20T08:24:30Z   File 'a.py'", "  File 'a.py'"),
        # Other JSON than a collector's record stays whole.
        *(
            (text, text)
            for text in (
                *('{"log": broken', '{"error": {"message": "x"}}', '{"log": 3}'),
                *("{}", '{"a": [1]}', '{"log": [1, 999]}'),
            )
        ),
        # A message that quotes a log line stays whole.
        (
            "INFO 11-20 08:24:30 [a.py:1] prompt: (Worker pid=2) ERROR 11-20 08:24:30 [w.py:1] x",
            "prompt: (Worker pid=2) ERROR 11-20 08:24:30 [w.py:1] x",
        ),
    ],
)
def test_the_text_of_a_line(raw: str, text: str) -> None:
    assert read_line(raw).text == text


@pytest.mark.parametrize("key", ["log", "line", "message", "MESSAGE", "msg", "textPayload"])
@pytest.mark.parametrize("in_colour", [False, True])
def test_json_records_are_read_like_their_log(key: str, in_colour: bool) -> None:
    text = recording("v0.32.0-killed-inflight")
    # journald writes a message with colours as a list of bytes
    records = [
        {"time": "x", key: list(f"\x1b[1m{line}".encode()) if in_colour else line}
        for line in text.splitlines()
    ]
    read = read_lines("\n".join(map(json.dumps, records)))
    assert [line.text for line in read] == [line.text for line in read_lines(text)]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_read_with_and_without_a_mark(encoding: str) -> None:
    log = "first\nthe “cause”".encode(encoding)
    for source in (log, io.BufferedReader(io.BytesIO(log))):
        assert [line.text for line in read_lines(source)] == ["first", "the “cause”"]


def test_text_with_commas_is_no_table() -> None:
    text = ["1, a b", "2, c d", "x, e f"]
    assert [line.text for line in read_lines("\n".join(text))] == text
    never_closed = 'Date,Line\n9,first\n9,"' + "x" * 2_000_000 + "\nlast\n"
    assert [line.text for line in read_lines(never_closed)][:2] == ["Line", "first"]


class Endless(io.RawIOBase):
    """File without a line end that refuses to return all its bytes at once."""

    def __init__(self, size: int) -> None:
        self.left = size

    def readline(self, size: int | None = -1, /) -> bytes:
        assert size is not None
        assert 0 < size <= MAX_LINE
        taken = min(size, self.left)
        self.left -= taken
        return b"x" * taken


def test_an_endless_line_is_read_in_pieces() -> None:
    file = Endless(20 * MAX_LINE + 5)
    assert [len(line.raw) for line in read_lines(file)] == [MAX_LINE]
    assert file.left == 0


STAMPED = "(Worker pid=2) ERROR 11-20 08:24:30 [w.py:1] x"
BAR = "100%|##| 5/5 [00:01]"


def test_a_log_line_after_a_progress_bar_is_split_off() -> None:
    lines = list(read_lines(f"50%|#\r{BAR}{STAMPED}\nnext"))
    assert [(int(line.number), line.process, line.text) for line in lines] == [
        *((1, "", "50%|#"), (1, "", BAR), (1, "Worker", "x"), (2, "", "next"))
    ]


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        # a bar is no prefix
        ([f"{BAR}{STAMPED}"] * 2 + [STAMPED] * 3 + [BAR], [BAR, "x"] * 2 + ["x"] * 3 + [BAR]),
        (
            ["0: first", f"0: {STAMPED}", f"1: {STAMPED}", "0:     raise x", "0:"],
            ["first", "x", "x", "    raise x", ""],
        ),
        # one line shows no rule
        (["0: first", f"0: {STAMPED}"], ["0: first", f"0: {STAMPED}"]),
    ],
)
def test_a_prefix_is_learnt_if_most_lines_have_it(lines: list[str], texts: list[str]) -> None:
    assert [line.text for line in read_lines("\n".join(lines))] == texts


def test_broken_utf8_is_replaced_and_a_long_line_is_cut() -> None:
    lines = list(read_lines(b"a\xff\n" + b"x" * (MAX_LINE + 10) + b"\nend"))
    assert [line.text for line in lines] == ["a�", "x" * MAX_LINE, "end"]


def test_an_open_binary_file_reads_like_its_text() -> None:
    path = DATA / "recordings" / "v0.20.2-boot.log"
    with path.open("rb") as file:
        from_file = list(read_lines(file))
    text = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
    assert from_file == list(read_lines(text))
    last = len(text.removesuffix("\n").split("\n"))
    assert {line.number for line in from_file} == set(range(1, last + 1))


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=300))
@settings(max_examples=100)
def test_any_text_is_read(text: str) -> None:
    lines = list(read_lines(text))
    assert [line.number for line in lines] == sorted(line.number for line in lines)
    assert all(line.raw.endswith(line.text) for line in lines)


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
    servers = sorted(set(re.findall(r"^\(APIServer pid=\d+\) ", "\n".join(lines), re.MULTILINE)))
    prefixes = chance.choice((servers or [""], [*servers, ""], [*servers, "(APIServer pid=4242) "]))
    places = sorted(chance.randrange(len(lines) + 1) for _ in range(3))
    for place in reversed(places):
        lines[place:place] = access_lines(chance, prefixes, chance.choice((30, 300, 600)))
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


STAMPED_RUNS = [
    *map("".join, zip(STAMPS[2:], (ACCESS, COUNTS, ACCESS, ACCESS, COUNTS), strict=True))
]


@pytest.mark.parametrize(
    "lines", [[ACCESS], [COUNTS], [ACCESS, COUNTS], *([line] for line in STAMPED_RUNS)]
)
def test_a_run_is_skipped_but_for_its_first_and_last_lines(lines: list[str]) -> None:
    times = 20_000 // len(lines)
    log = "".join(line + "\n" for line in lines).encode() * times + b"end\n"
    runs, seen = AccessRuns(), list[Line]()
    for read in read_lines(io.BufferedReader(io.BytesIO(log)), runs):
        seen.append(read)
        runs.skip([kind for line in lines if (kind := kind_of(line))])
    assert len(seen) < 600
    assert [line.number for line in seen[-2:]] == [20_000, 20_001]
    assert runs.lines == runs.dropped == 20_001 - len(seen)
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
                "(EngineCore pid=10) ERROR 11-20 08:24:30 [core.py:9] "
                "EngineCore encountered a fatal error."
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
    assert most(200) < most(20) + 400_000


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
