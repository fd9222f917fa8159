from __future__ import annotations

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.diagnosis.logs import DATA, recording
from vllm_repro_diagnosis.log_text import MAX_LINE, Line, read_lines


def one(text: str) -> Line:
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
            "(RayWorkerWrapper pid=8, ip=10.0.0.1) (EngineCore pid=5) INFO 11-20 08:24:30 [a.py:1] z",
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
    line = one(raw)
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
    line = one(collector.format(bare))
    assert (line.process, line.pid, line.level, line.source) == (
        "EngineCore",
        5,
        "ERROR",
        "core.py:1138",
    )
    assert line.text == "    raise AssertionError("


def test_a_colour_around_the_prefix_is_removed() -> None:
    line = one("[1;36m(APIServer pid=9627)[0;0m INFO 11-20 08:24:30 [a.py:1] x")
    assert (line.process, line.level, line.text) == ("APIServer", "INFO", "x")
    assert one("rate(requests[5m]) and a[10] stay").text == "rate(requests[5m]) and a[10] stay"


def test_indentation_without_a_vllm_prefix_is_kept() -> None:
    assert one("    raise AssertionError(").text == "    raise AssertionError("
    assert one(">     raise AssertionError(").text == "    raise AssertionError("
    assert one("2026-11-20T08:24:30Z   File 'a.py'").text == "  File 'a.py'"


@pytest.mark.parametrize(
    "key", ["log", "line", "message", "MESSAGE", "msg", "textPayload", "journald in colour"]
)
def test_json_records_are_read_like_their_log(key: str) -> None:
    text = recording("v0.32.0-killed-inflight")
    records: list[dict[str, object]]
    if key == "journald in colour":
        records = [{"MESSAGE": list(f"\x1b[1m{line}".encode())} for line in text.splitlines()]
    else:
        records = [{"time": "x", key: line} for line in text.splitlines()]
    read = read_lines("\n".join(map(json.dumps, records)))
    assert [line.text for line in read] == [line.text for line in read_lines(text)]


@pytest.mark.parametrize(
    "text",
    [
        '{"log": broken',
        '{"error": {"message": "x"}}',
        '{"log": 3}',
        "{}",
        '{"a": [1]}',
        '{"log": [1, 999]}',
    ],
)
def test_other_json_stays_whole(text: str) -> None:
    assert one(text).text == text


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


def test_a_log_line_after_a_progress_bar_is_split_off() -> None:
    text = "Capturing: 50%|#\rCapturing: 100%|##| 5/5 [00:01](Worker pid=2) ERROR 11-20 08:24:30 [w.py:1] x\nnext"
    lines = list(read_lines(text))
    assert [line.number for line in lines] == [1, 2, 2, 3]
    assert (lines[2].process, lines[2].text) == ("Worker", "x")
    assert lines[3].text == "next"


def test_a_prefix_is_learnt_only_if_most_lines_have_it() -> None:
    stamped = "(Worker pid=2) ERROR 11-20 08:24:30 [w.py:1] x"
    bar = f"100%|##| 5/5 [00:01]{stamped}\n100%|##| 5/5 [00:01]{stamped}\n"
    words = [line.text for line in read_lines(bar + f"{stamped}\n" * 3 + "100%|##| 5/5 [00:01]")]
    assert words[-1] == "100%|##| 5/5 [00:01]", "a bar is no prefix"
    lines = list(read_lines(f"0: first\n0: {stamped}\n1: {stamped}\n0:     raise x\n0:"))
    assert [line.text for line in lines] == ["first", "x", "x", "    raise x", ""]
    assert next(line.text for line in read_lines(f"0: first\n0: {stamped}")) == "0: first", (
        "one line shows no rule"
    )


def test_a_message_that_quotes_a_log_line_stays_whole() -> None:
    quoted = "(APIServer pid=1) INFO 11-20 08:24:30 [a.py:1] prompt: (Worker pid=2) ERROR 11-20 08:24:30 [w.py:1] x"
    assert one(quoted).text.startswith("prompt: (Worker")


def test_broken_utf8_is_replaced_and_a_long_line_is_cut() -> None:
    lines = list(read_lines(b"a\xff\n" + b"x" * (MAX_LINE + 10) + b"\nend"))
    assert lines[0].text == "a�"
    assert len(lines[1].raw) == MAX_LINE
    assert lines[2].text == "end"


def test_an_open_binary_file_reads_like_its_text() -> None:
    path = DATA / "recordings" / "v0.20.2-boot.log"
    with path.open("rb") as file:
        from_file = list(read_lines(file))
    text = path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
    assert from_file == list(read_lines(text))
    assert {line.number for line in from_file} == set(
        range(1, text.removesuffix("\n").count("\n") + 2)
    )


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=300))
@settings(max_examples=100)
def test_any_text_is_read(text: str) -> None:
    lines = list(read_lines(text))
    assert [line.number for line in lines] == sorted(line.number for line in lines)
    for line in lines:
        assert line.raw.endswith(line.text)
