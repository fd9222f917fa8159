"""A program that is run on a leash ends with whoever runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from vllm_repro.releases.leash import run_leashed

# A program with a child, like pip, which runs itself again below the interpreter that it installs for.
FAMILY = """
import os, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path(sys.argv[1] + ".new").write_text(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
print("at work", flush=True)
time.sleep(60)
"""


def family(pids: Path) -> list[str]:
    return [sys.executable, "-c", FAMILY, str(pids)]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def living(pids: Path) -> list[int]:
    """Those of the family that still run; one that has ended may wait for its new parent to notice."""
    found = []
    for pid in map(int, pids.read_text().split()):
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for_the_end(pids: Path) -> None:
    deadline = time.monotonic() + 10
    while living(pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("status", [0, 3, -signal.SIGTERM, -signal.SIGKILL, -signal.SIGSEGV])
def test_the_program_s_end_is_told_as_it_was(status: int) -> None:
    end = f"os.kill(os.getpid(), {-status})" if status < 0 else f"os._exit({status})"
    script = f"import os, sys; print('out', flush=True); print('err', file=sys.stderr, flush=True); {end}"
    assert run_leashed([sys.executable, "-c", script], os.environ) == (status, "out\nerr\n")


def test_it_has_the_environment_that_was_given_and_nothing_to_read() -> None:
    script = "import os, sys; print(os.environ['ONE'], 'HOME' in os.environ, repr(sys.stdin.read()))"
    assert run_leashed([sys.executable, "-c", script], {"ONE": "1"}) == (0, "1 False ''\n")


def test_an_interrupt_ends_it_and_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def interrupt(lines: Sequence[str]) -> None:
        if list(lines) == ["at work\n"]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_leashed(family(pids), os.environ, tick_s=0.05, tick=interrupt)
    wait_for_the_end(pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_does_not_outlive_a_killed_parent(tmp_path: Path, number: signal.Signals) -> None:
    pids = tmp_path / "pids"
    script = "import os, sys; from vllm_repro.releases.leash import run_leashed; run_leashed(sys.argv[1:], os.environ)"
    with subprocess.Popen([sys.executable, "-c", script, *family(pids)]) as parent:
        wait_for(pids)
        assert len(living(pids)) == 2
        parent.send_signal(number)
    wait_for_the_end(pids)
