from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_repro.journal.log_excerpts import PAGE_SIZES, ExcerptSizes, LogExcerpts, read_excerpts
from vllm_repro.journal.redact import Redactor
from vllm_repro.report.text import size

SMALL = ExcerptSizes(
    head=1_024, error=6_144, root=5_120, traceback=12_288, tail=4_096, whole=12_288
)
LARGEST = 28_000
"""Bytes of all excerpts of these sizes."""


def excerpt(log: LogExcerpts) -> str:
    """Return the excerpts of a log with what is left out before each."""
    parts = (
        (f"[… {one.before:,} bytes left out …]" if one.before else "", one.text.strip("\n"))
        for one in log.excerpts
    )
    return "\n".join(text for part in parts for text in part if text)


def excerpts_of(
    folder: Path,
    text: str,
    root: str | None = "AssertionError",
    sizes: ExcerptSizes = SMALL,
) -> LogExcerpts:
    (folder / "a.log").write_text(text, encoding="utf-8")
    log = read_excerpts(folder, "a.log", Redactor(), root, sizes)
    assert log is not None
    return log


def test_a_small_log_is_whole_and_in_order(tmp_path: Path) -> None:
    text = "".join(f"line {n}\n" for n in range(50)) + "ERROR one\nAssertionError: two\nlast"
    log = excerpts_of(tmp_path, text)
    assert "".join(one.text for one in log.excerpts) == text
    assert all(one.before == 0 for one in log.excerpts)
    assert (log.size, excerpts_of(tmp_path, "").excerpts) == (len(text), ())
    assert (
        excerpt(excerpts_of(tmp_path, "(Worker pid=4) ERROR boom")) == "(Worker pid=4) ERROR boom"
    )


def test_first_error_root_and_end_of_a_long_one(tmp_path: Path) -> None:
    filling = "INFO filling\n" * 20_000
    text = (
        f"begin\n{filling}ERROR first\n{filling}Traceback (most recent call last):\n "
        f" x\nAssertionError: root\n{filling}the end\n"
    )
    shown = excerpt(excerpts_of(tmp_path, text))
    places = [
        shown.index(word)
        for word in ("begin", "ERROR first", "Traceback", "AssertionError: root", "the end")
    ]
    assert (places, shown.count("bytes left out")) == (sorted(places), 3)
    assert size(shown) <= LARGEST
    assert "Traceback" not in excerpt(excerpts_of(tmp_path, text, root=None))


@pytest.mark.parametrize("sizes", [SMALL, PAGE_SIZES])
@pytest.mark.parametrize(("over", "whole"), [(-1_000, True), (1_000, False)])
def test_a_long_traceback_is_whole_up_to_its_limit(
    tmp_path: Path, sizes: ExcerptSizes, over: int, whole: bool
) -> None:
    frame = (
        '(EngineCore_DP0 pid=7) ERROR 11-23 15:00:00 [core.py:1]   File "a.py", line {}, in step\n'
    )
    frames = "".join(
        frame.format(1_000 + number)
        for number in range((sizes.traceback + over) // len(frame.format(1_000)))
    )
    filling = "INFO filling\n" * 30_000
    text = (
        f"{filling}ERROR first\n{filling}Traceback (most recent call"
        f" last):\n{frames}AssertionError: root\n{filling}"
    )
    shown = excerpt(excerpts_of(tmp_path, text, sizes=sizes))
    assert ("Traceback (most" in shown, frames in shown) == (whole, whole)
    assert frames[-1_000:] + "AssertionError: root" in shown
    assert size(shown) <= (LARGEST if sizes is SMALL else PAGE_SIZES.whole)


def test_an_error_that_a_warning_quotes_is_not_the_first(tmp_path: Path) -> None:
    filling = "INFO filling\n" * 10_000
    text = (
        f"WARNING this can cause errors like `OSError: [Errno 24]`\n{filling}(Worker pid=4) ERROR"
        f" it hit an exception.\n{filling}"
    )
    assert "ERROR it hit an exception." in excerpt(excerpts_of(tmp_path, text))


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    text = "".join(f"line {n}\n" for n in range(30_000))
    shown = excerpt(excerpts_of(tmp_path, text))
    (note,) = [line for line in shown.splitlines() if "left out" in line]
    counted = int(note.split()[1].replace(",", ""))
    kept = sum(size(line) + 1 for line in shown.splitlines() if line != note)
    assert abs(counted + kept - len(text)) <= 2


def test_a_log_larger_than_the_memory_is_not_read_into_it(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("wb") as file:
        file.write(b"begin\n")
        for _ in range(120):
            file.write(b"INFO filling\n" * 80_000)
        file.write(b"ERROR late\nthe end\n")
    tracemalloc.start()
    log = read_excerpts(tmp_path, "a.log", Redactor(), None)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert log is not None
    assert log.size > 100_000_000
    assert most < 10_000_000
    assert "ERROR late" in excerpt(log)


def test_one_endless_line(tmp_path: Path) -> None:
    log = excerpts_of(tmp_path, "ERROR " + "x" * 1_000_000)
    assert sum(size(one.text) for one in log.excerpts) < 100_000
    assert excerpt(log).startswith("ERROR x")
    assert "more characters in this line" in excerpt(log)


LINES = ["ERROR a", "ordinary " * 20, "语" * 300, "", "AssertionError: x", "y" * 5_000]


@settings(max_examples=50)
@given(lines=st.lists(st.sampled_from(LINES), max_size=60))
def test_an_excerpt_is_small_and_has_the_first_error(
    lines: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    shown = excerpt(excerpts_of(tmp_path_factory.mktemp("log"), "\n".join(lines)))
    assert size(shown) <= LARGEST
    errors = [line for line in lines if line.startswith(("ERROR", "AssertionError"))]
    assert not errors or errors[0] in shown


def test_a_key_of_several_lines_whose_head_a_window_cuts(tmp_path: Path) -> None:
    """Begin a window in the middle of the key's first line."""
    key = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkq\n-----END PRIVATE KEY-----\n"
    for filling in range(900, 1100):
        text = "x" * 20_000 + key + "y\n" * (filling // 2) + "ERROR boom\n"
        assert all("MIIEvQ" not in one.text for one in excerpts_of(tmp_path, text).excerpts), (
            filling
        )
