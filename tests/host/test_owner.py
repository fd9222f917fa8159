"""Owners of processes: alive or gone."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest

from vllm_repro.host.owner import Owner, _is_gone, is_gone, this_owner

HERE = Owner(pid=10, started=5000.0, boot="boot-a", host="host-a", namespace="pid:[1]")
PRINT_OWNER = (
    "import msgspec; from vllm_repro.host.owner import this_owner; "
    "print(msgspec.json.encode(this_owner()).decode(), flush=True); input()"
)


def test_this_process_is_not_gone() -> None:
    assert this_owner().pid == os.getpid()
    assert this_owner() == this_owner()
    assert not is_gone(this_owner())


def test_an_ended_process_is_gone_before_and_after_it_is_reaped() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", PRINT_OWNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with child:
        assert child.stdout is not None
        owner = msgspec.json.decode(child.stdout.readline(), type=Owner)
        assert owner.pid == child.pid
        assert not is_gone(owner)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(owner), "its zombie counted as alive"
        child.wait()
        assert is_gone(owner)


@pytest.mark.parametrize(
    ("owner", "started", "expected"),
    [
        (HERE, 5000.0, False),
        (HERE, 5001.0, True),  # the pid was reused
        (HERE, None, True),
        (replace(HERE, boot="boot-b"), 5000.0, True),
        (replace(HERE, host="host-b"), None, False),
        (replace(HERE, host="host-b", boot="boot-b"), None, False),
        (replace(HERE, namespace="pid:[2]"), None, False),
        (replace(HERE, namespace="pid:[2]", boot="boot-b"), None, True),
    ],
)
def test_what_is_gone_as_seen_from_here(owner: Owner, started: float | None, expected: bool) -> None:
    assert _is_gone(owner, HERE, started) is expected


def test_wall_clock_starts_are_compared_with_slack() -> None:
    here = replace(HERE, boot="")
    assert not _is_gone(here, here, here.started + 1)
    assert _is_gone(here, here, here.started + 3)
