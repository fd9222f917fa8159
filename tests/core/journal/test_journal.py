from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_repro.errors import HarnessBug, InfraError, UsageError
from vllm_repro.journal.journal import Journal, read
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
