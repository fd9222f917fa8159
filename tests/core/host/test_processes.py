"""Sessions of processes and their leases."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_repro.errors import InfraError
from vllm_repro.host.host_id import hardware, host_id, hosted_by
from vllm_repro.host.lease import Lease, free_leases, lease_folder
from vllm_repro.host.machine import look
from vllm_repro.host.processes import (
    Session,
    end_sessions,
    session_members,
    sessions_writing_to,
    start,
)

# A leader with a child that ignores SIGTERM and leaves the process group, as a stubborn worker
# might.
STUBBORN = """
import os, signal, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf], process_group=0)
print("up", flush=True)
time.sleep(600)
"""


def run_python(script: str, log: Path, **env: str) -> Session:
    return start([sys.executable, "-c", script], {**env, **os.environ}, log)


def wait_for(text: str, log: Path) -> None:
    deadline = time.monotonic() + 30
    while text not in (log.read_text(encoding="utf-8") if log.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_session_ends_whole_even_a_child_that_left_the_group(tmp_path: Path) -> None:
    started = run_python(STUBBORN, tmp_path / "log")
    wait_for("up", tmp_path / "log")
    assert (len(session_members(started.id)), len(list(lease_folder().iterdir()))) == (2, 1)
    assert free_leases() == {}, "its owner lives"
    started.end(grace=0.5)
    assert (session_members(started.id), list(lease_folder().iterdir())) == ([], [])
    started.end()  # a second time is harmless


def test_the_sessions_of_a_log_end_whole_and_no_other(tmp_path: Path) -> None:
    ours, other = (run_python(STUBBORN, tmp_path / name) for name in ("log", "other"))
    try:
        for name in ("log", "other"):
            wait_for("up", tmp_path / name)
        log = (tmp_path / "log").stat()
        assert sessions_writing_to((log.st_dev, log.st_ino)) == {ours.id}
        end_sessions([ours.id], grace=0.2)
        assert (session_members(ours.id), len(session_members(other.id))) == ([], 2)
    finally:
        ours.end(grace=0)
        other.end(grace=0)


SHARED_MEMORY = """
import time
from multiprocessing import resource_tracker, shared_memory
kept = shared_memory.SharedMemory(create=True, size=9)
resource_tracker.unregister(kept._name, 'shared_memory')
print(kept.name, flush=True)
time.sleep(600)
"""
SEMAPHORE = """
import signal, time
from multiprocessing import get_context
signal.signal(signal.SIGTERM, signal.SIG_IGN)
kept = get_context('spawn').Lock()
print('sem.' + kept._semlock.name.strip('/'), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("script", "grace"),
    [(SHARED_MEMORY, 3.0), (SEMAPHORE, 0.2)],
    ids=["memory, ended by SIGTERM", "semaphore, killed"],
)
def test_what_an_ended_process_shares_is_removed(tmp_path: Path, script: str, grace: float) -> None:
    started = run_python(script, tmp_path / "log")
    wait_for("\n", tmp_path / "log")
    segment = Path("/dev/shm") / (tmp_path / "log").read_text(encoding="utf-8").strip()
    assert segment.exists()
    end_sessions([started.id], grace=grace)
    started.end()
    assert not segment.exists()


BOTH = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
FIRST_VARIABLE = (
    "import pathlib; print(pathlib.Path('/proc/self/environ').read_text().split(chr(0))[0])"
)


@pytest.mark.parametrize(
    ("script", "status", "words"),
    # setproctitle may fail with another first variable
    [(BOTH, 3, {"out", "err"}), (FIRST_VARIABLE, 0, {"FIRST=1"})],
    ids=["both outputs", "the first variable is the caller's"],
)
def test_output_of_a_process_that_ends_at_once_is_whole(
    tmp_path: Path, script: str, status: int, words: set[str]
) -> None:
    started = run_python(script, tmp_path / "log", FIRST="1")
    assert started.popen.wait(timeout=30) == status
    started.end()
    assert set((tmp_path / "log").read_text(encoding="utf-8").split()) == words


def test_temporary_files_of_a_process_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    script = "import tempfile; print(tempfile.mkstemp(), flush=True); input()"
    started = run_python(script, tmp_path / "log")
    started.popen.wait(timeout=30)
    assert [len(list(one.iterdir())) for one in temporary.iterdir()] == [1]
    started.end()
    assert list(temporary.iterdir()) == []


def test_what_cannot_be_started_leaves_no_lease(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match="cannot start /nowhere/vllm: No such file"):
        start(["/nowhere/vllm"], os.environ, tmp_path / "log")
    assert list(lease_folder().iterdir()) == []


def test_a_state_folder_that_cannot_be_written_is_infra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(InfraError, match="Not a directory") as refused:
        run_python("pass", tmp_path / "log")
    assert f"cannot write to {lease_folder()}," in str(refused.value)
    assert "set XDG_STATE_HOME" in refused.value.hint


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """Return a process that holds a lease."""
    script = (
        "from vllm_repro.host.lease import Lease; lease = Lease('x'); print(lease.path.name,"
        " flush=True); input()"
    )
    words = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process
        process.kill()


def test_a_lease_is_free_before_its_process_is_reaped(
    holder: subprocess.Popen[str],
) -> None:
    assert holder.stdout is not None
    name = holder.stdout.readline().strip()
    assert free_leases() == {}
    holder.kill()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    ((path, facts),) = free_leases().items()
    assert (path.name, facts.pid, facts.folder, facts.log) == (
        name,
        holder.pid,
        str(Path.cwd()),
        None,
    )


def test_a_damaged_lease_and_one_of_another_host_are_skipped() -> None:
    lease = Lease("x")
    other_host = lease.path.with_name(f"0{lease.path.name}")
    for path in (other_host, lease.path.with_name(f"{lease.path.name}-damaged")):
        path.write_bytes(lease.path.read_bytes()[: None if path == other_host else -1])
    assert free_leases() == {}
    lease.release()


MACHINE: dict[str, Any] = {
    "os": "Linux 6.1",
    "cpus": 16,
    "memory_gb": 125.7,
    "gpus": [{"name": "NVIDIA H200"}] * 2,
}


def test_a_machine_keeps_its_id_with_another_kernel() -> None:
    assert host_id(MACHINE) == host_id({**MACHINE, "os": "Linux 6.2", "memory_gb": 125.9})
    assert host_id(MACHINE) != host_id({**MACHINE, "gpus": []})
    assert host_id(MACHINE, ["GPU-b", "GPU-a"]) == host_id(
        {**MACHINE, "cpus": 8}, ["GPU-a", "GPU-b"], "x"
    )
    assert host_id(MACHINE, ["GPU-a"]) != host_id(MACHINE, ["GPU-b"])
    assert host_id(MACHINE, number="x") != host_id(MACHINE, number="y")


@given(st.text(max_size=30))
def test_an_id_is_eight_hex_digits(number: str) -> None:
    assert re.fullmatch("[0-9a-f]{8}", host_id(MACHINE, number=number))


def test_an_id_holds_no_name_of_this_machine() -> None:
    machine = asdict(look())
    found = hosted_by(machine)
    assert found == hosted_by(machine)
    assert socket.gethostname() not in found + hardware(machine)


def test_hardware_in_words() -> None:
    assert (hardware(MACHINE), hardware({**MACHINE, "gpus": []})) == ("2 x NVIDIA H200", "16 CPUs")
