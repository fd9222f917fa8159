from __future__ import annotations

import errno
import json
import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_repro.errors import HarnessBug, InfraError, UsageError
from vllm_repro.journal.journal import Journal, read
from vllm_repro.journal.log_excerpts import PAGE_SIZES, ExcerptSizes, LogExcerpts, read_excerpts
from vllm_repro.journal.redact import Redactor
from vllm_repro.report.text import size
from vllm_repro.trigger.trigger import TriggerResult
from vllm_repro.verdict.outcome import Outcome


def test_what_was_written_is_read(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.write(
            "started", finding=TriggerResult(True, ("proof",)), outcome=Outcome.CRASH, path=tmp_path
        )
        journal.write("run-ended", interrupted=None)
    recording = read(tmp_path / "journal.jsonl")
    assert [entry.event for entry in recording.entries] == ["started", "run-ended"]
    finding = {"crossed": True, "evidence": ["proof"], "brief": "", "amounts": []}
    assert recording.entries[0].fields.items() >= {"finding": finding, "outcome": "crash"}.items()
    assert (recording.cut, recording.damaged) == (False, 0)


def test_a_line_is_on_disk_before_write_returns(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.write("one")
    assert json.loads((tmp_path / "j").read_text())["event"] == "one"
    journal.close()
    journal.write("after the end")  # a thread that is late must not crash, and must not write
    assert len((tmp_path / "j").read_text().splitlines()) == 1


def test_a_disk_that_is_full_for_a_while_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    room = [10]

    def almost_full(file: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: room.pop()])

    with Journal(tmp_path / "j") as journal:
        journal.write("before")
        monkeypatch.setattr(os, "write", almost_full)
        with pytest.raises(InfraError, match="No space left on device"):
            journal.write("lost")
        monkeypatch.setattr(os, "write", write)
        journal.write("after")
    recording = read(tmp_path / "j")
    assert [entry.event for entry in recording.entries] == ["before", "after"]
    assert recording.damaged == 1


def test_threads_do_not_tear_lines(tmp_path: Path) -> None:
    with Journal(tmp_path / "j") as journal:

        def many() -> None:
            for _ in range(50):
                journal.write("x", text="y" * 5000)

        with ThreadPoolExecutor(4) as threads:
            for _ in range(4):
                threads.submit(many)
    recording = read(tmp_path / "j")
    assert (len(recording.entries), recording.damaged) == (200, 0)


@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # each example writes its file anew
@given(cut=st.integers(0, 400))
def test_a_journal_cut_at_any_byte_is_readable(tmp_path: Path, cut: int) -> None:
    whole = tmp_path / "whole"
    if not whole.exists():
        with Journal(whole) as journal:
            for number in range(4):
                journal.write("step", number=number, text="Größe | `x`")
            journal.write("run-ended", interrupted=None)
    raw = whole.read_bytes()
    part = tmp_path / "part"
    part.write_bytes(raw[: min(cut, len(raw))])
    recording = read(part)
    ended = bool(recording.entries) and recording.entries[-1].event == "run-ended"
    assert recording.cut is not ended
    assert recording.damaged <= 1
    assert [entry["number"] for entry in recording.of("step")] == list(
        range(len(list(recording.of("step"))))
    )


def test_no_journal_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no journal at"):
        read(tmp_path / "missing.jsonl")


def test_the_end_of_a_trial_is_on_the_disk_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.write("sign", channel="log")
        assert synced == []
        journal.write("trial-ended", arm="reported", trial=1)
        assert len(synced) == 1


def test_a_removed_journal_is_named_at_the_end_of_a_trial(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.write("trial-ended", trial=1)
        (tmp_path / "journal.jsonl").unlink()
        journal.write("answer")
        with pytest.raises(HarnessBug, match=r"journal\.jsonl was removed"):
            journal.write("run-ended")


def test_a_doubled_or_lost_end_of_a_trial_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        for trial in (1, 2):
            journal.write("trial-started", trial=trial)
            journal.write("trial-ended", trial=trial)
        journal.write("run-ended", interrupted=None)
    lines = path.read_text().splitlines()
    assert read(path).damaged == 0
    path.write_text("\n".join(lines[:2] + lines[1:]))
    assert (read(path).damaged, len(list(read(path).of("trial-ended")))) == (1, 2)
    path.write_text("\n".join(lines[:1] + lines[2:]))
    assert read(path).damaged == 1


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
