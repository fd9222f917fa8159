from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.host.owner import Fate, Owner, fate, is_alive, judge, this_owner

HERE = Owner(10, 5000.0, "boot-a", "host-a", "pid:[1]")


def test_this_process_is_alive() -> None:
    owner = this_owner()
    assert owner.pid == os.getpid()
    assert fate(owner) is Fate.ALIVE
    assert owner == this_owner()


SAY_WHO = "from vllm_repro.host.owner import this_owner; print(this_owner().labels('o'), flush=True); input()"


def test_an_ended_process_is_gone_before_and_after_it_is_reaped() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SAY_WHO],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with child:
        assert child.stdout is not None
        written: dict[str, str] = ast.literal_eval(child.stdout.readline())
        owner = Owner.from_labels(written, "o")
        assert owner is not None
        assert owner.pid == child.pid
        assert is_alive(owner)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert fate(owner) is Fate.GONE, "its zombie counted as alive"
        child.wait()
        assert fate(owner) is Fate.GONE


def test_a_pid_that_was_used_again_is_another_owner() -> None:
    assert fate(replace(this_owner(), started=1.0)) is Fate.GONE


@pytest.mark.parametrize(
    ("owner", "started", "expected"),
    [
        (HERE, 5000.0, Fate.ALIVE),
        (HERE, 5001.0, Fate.GONE),
        (HERE, None, Fate.GONE),
        (replace(HERE, boot="boot-b"), 5000.0, Fate.GONE),
        (replace(HERE, host="host-b"), None, Fate.UNKNOWN),
        (replace(HERE, host="host-b", boot="boot-b"), None, Fate.UNKNOWN),
        (replace(HERE, namespace="pid:[2]"), None, Fate.UNKNOWN),
        (replace(HERE, namespace="pid:[2]", boot="boot-b"), None, Fate.GONE),
    ],
)
def test_fate_seen_from_here(owner: Owner, started: float | None, expected: Fate) -> None:
    assert judge(owner, HERE, started) is expected


def test_wall_clock_starts_are_compared_with_slack() -> None:
    here = replace(HERE, boot="")
    assert judge(here, here, here.started + 1) is Fate.ALIVE
    assert judge(here, here, here.started + 3) is Fate.GONE


@given(
    st.builds(
        Owner,
        pid=st.integers(1, 2**22),
        started=st.floats(0, 1e12),
        boot=st.text(max_size=40),
        host=st.text(max_size=40),
        namespace=st.text(max_size=40),
    )
)
def test_labels_keep_an_owner(owner: Owner) -> None:
    assert Owner.from_labels(owner.labels("org.example"), "org.example") == owner


@pytest.mark.parametrize("damage", [{"p.pid": "x"}, {"p.started": ""}])
def test_damaged_labels_name_no_owner(damage: dict[str, str]) -> None:
    assert Owner.from_labels(HERE.labels("p") | damage, "p") is None
    assert Owner.from_labels({}, "p") is None
