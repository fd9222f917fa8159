"""Sizes on disk, the lock of the cache, and the processes that use a folder."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from tests.core.releases.conftest import silent
from vllm_repro.errors import InfraError
from vllm_repro.releases.disk import disk_usage, human_size, locked, processes_using


def test_sizes(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x").write_bytes(b"123")
    (tmp_path / "a" / "b" / "y").write_bytes(b"4567")
    (tmp_path / "a" / "b" / "link").hardlink_to(tmp_path / "a" / "x")
    assert disk_usage([tmp_path / "a", tmp_path / "absent"]) == 7
    assert (human_size(999_000_000), human_size(1_100_000_000)) == ("999 MB", "1.1 GB")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(InfraError, match="cannot use the cache at"),
        locked(tmp_path / "file" / "cache", "installing", silent),
    ):
        pass


def test_processes_with_a_mapped_file_use_a_folder(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    path = tmp_path / "used" / "file"
    path.write_bytes(b"x" * mmap.PAGESIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert processes_using(tmp_path / "used") == [os.getpid()]
        assert processes_using(tmp_path / "use") == []
