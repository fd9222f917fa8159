"""Folders that are whole or not there. The lock is tested with the cache that uses it, in test_lock.py."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from vllm_repro.releases.cachefiles import becoming, locked, processes_using, read_marker, remove_partial, write_marker


def test_a_folder_appears_when_it_is_whole(tmp_path: Path) -> None:
    final = tmp_path / "parent" / "final"
    with becoming(final) as folder:
        (folder / "file").write_text("12345")
        write_marker(folder, seconds=1.25, version="0.28.0")
        assert not final.exists()
        assert read_marker(folder) is None  # whoever looks now must not take it for whole
    assert read_marker(final) == {"seconds": 1.2, "size": 5, "version": "0.28.0"}
    assert [path.name for path in final.parent.iterdir()] == ["final"]


def test_a_folder_that_broke_is_gone_and_the_old_one_stays(tmp_path: Path) -> None:
    final = tmp_path / "final"
    final.mkdir()

    def break_half_way() -> None:
        with becoming(final) as folder:
            (folder / "file").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        break_half_way()
    assert list(tmp_path.rglob("*")) == [final]


def test_partial_folders_are_removed_and_others_kept(tmp_path: Path) -> None:
    for name in (".partial-a-1", ".partial-b-2", "whole", ".hidden"):
        (tmp_path / name / "deep").mkdir(parents=True)
    remove_partial(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".hidden", "whole"]


@pytest.mark.parametrize("text", ["", "{", "\ufffd"])
def test_a_broken_marker_marks_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "complete.json").write_text(text)
    assert read_marker(tmp_path) is None


def test_the_lock_is_free_after_an_error(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(ZeroDivisionError), locked(tmp_path, "failing", said.append):
        raise ZeroDivisionError
    with locked(tmp_path, "working", said.append):
        assert (tmp_path / "lock").read_text() == f"working (pid {os.getpid()})"
    assert said == []


def test_a_process_that_runs_from_a_folder_is_seen(tmp_path: Path) -> None:
    assert processes_using(tmp_path) == []
    (tmp_path / "library.so").write_bytes(b"x" * 100)
    with (
        (tmp_path / "library.so").open("rb") as file,
        mmap.mmap(file.fileno(), 100, access=mmap.ACCESS_READ),
    ):
        assert processes_using(tmp_path) == [os.getpid()]
        assert processes_using(tmp_path / "lib") == []
    assert processes_using(tmp_path) == []
