"""A file is written whole or not at all, and nothing of it is left beside."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_repro.errors import InfraError
from vllm_repro.report.files import write_whole


def test_what_cannot_be_written_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    def cut_short() -> Iterator[str]:
        yield "half of it"
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "report.html"
    write_whole(path, "the last one", hint="")
    with pytest.raises(InfraError, match="No space left on device") as refused:
        write_whole(path, cut_short(), hint="elsewhere")
    assert refused.value.hint == "elsewhere"
    assert path.read_text(encoding="utf-8") == "the last one"
    assert list(tmp_path.iterdir()) == [path]
