from __future__ import annotations

import io
import os

import pytest

from vllm_repro.running.terminal import Progress


def test_what_a_server_logs_cannot_steer_the_terminal() -> None:
    stream = io.StringIO()
    Progress(stream).line("booting; last line: \x1b[2J\x1b]0;title\x07 \x9b31m prompt\ttab")
    assert stream.getvalue() == "booting; last line:  \N{REPLACEMENT CHARACTER}31m prompt\ttab\n"


def test_a_run_goes_on_when_nobody_reads_its_progress() -> None:
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    Progress(stream).line("nobody reads this")
    with pytest.raises(BrokenPipeError):
        stream.close()
