"""Sessions of processes and their leases."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_repro.errors import InfraError
from vllm_repro.host.lease import Lease, free_leases, lease_folder
from vllm_repro.host.processes import end_sessions, session_members, sessions_writing_to, start

# A leader with a child that ignores SIGTERM and leaves the process group, as a stubborn worker
# might.
STUBBORN = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"],
                         process_group=0)
print("up", flush=True)
time.sleep(600)
"""


def wait_for(text: str, log: Path) -> None:
    deadline = time.monotonic() + 30
    while text not in (log.read_text(encoding="utf-8") if log.exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_session_ends_whole_even_a_child_that_left_the_group(tmp_path: Path) -> None:
    started = start([sys.executable, "-c", STUBBORN], os.environ, tmp_path / "log")
    wait_for("up", tmp_path / "log")
    assert (len(session_members(started.id)), len(list(lease_folder().iterdir()))) == (2, 1)
    assert free_leases() == {}, "its owner lives"
    started.end(grace=0.5)
    assert (session_members(started.id), list(lease_folder().iterdir())) == ([], [])
    started.end()  # a second time is harmless


def test_the_sessions_of_a_log_end_whole_and_no_other(tmp_path: Path) -> None:
    ours, other = (
        start([sys.executable, "-c", STUBBORN], os.environ, tmp_path / name)
        for name in ("log", "other")
    )
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


def test_shared_memory_of_a_process_that_sigterm_ends_is_removed(tmp_path: Path) -> None:
    script = (
        "import time; from multiprocessing import resource_tracker, shared_memory; kept ="
        " shared_memory.SharedMemory(create=True, size=9);resource_tracker.unregister(kept._name,"
        " 'shared_memory'); print(kept.name, flush=True); time.sleep(600)"
    )
    started = start([sys.executable, "-c", script], os.environ, tmp_path / "log")
    wait_for("\n", tmp_path / "log")
    segment = Path("/dev/shm") / (tmp_path / "log").read_text(encoding="utf-8").strip()
    assert segment.exists()
    end_sessions([started.id])
    started.end()
    assert not segment.exists()


def test_a_semaphore_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    script = (
        "import signal, time; from multiprocessing import get_context;"
        " signal.signal(signal.SIGTERM, signal.SIG_IGN);kept = get_context('spawn').Lock();"
        " print(kept._semlock.name, flush=True); time.sleep(600)"
    )
    started = start([sys.executable, "-c", script], os.environ, tmp_path / "log")
    wait_for("\n", tmp_path / "log")
    semaphore = Path(
        f"/dev/shm/sem.{(tmp_path / 'log').read_text(encoding='utf-8').strip().strip('/')}"
    )
    assert semaphore.exists()
    end_sessions([started.id], grace=0.2)
    started.end()
    assert not semaphore.exists()


def test_output_of_a_process_that_dies_at_once_is_whole(tmp_path: Path) -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    started = start([sys.executable, "-c", script], os.environ, tmp_path / "log")
    assert started.popen.wait(timeout=30) == 3
    started.end()
    assert set((tmp_path / "log").read_text(encoding="utf-8").split()) == {"out", "err"}


def test_temporary_files_of_a_process_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    script = "import tempfile; print(tempfile.mkstemp(), flush=True); input()"
    started = start([sys.executable, "-c", script], os.environ, tmp_path / "log")
    started.popen.wait(timeout=30)
    assert [len(list(one.iterdir())) for one in temporary.iterdir()] == [1]
    started.end()
    assert list(temporary.iterdir()) == []


def test_the_first_variable_of_a_process_is_the_callers(tmp_path: Path) -> None:
    script = (
        "import pathlib; print(pathlib.Path('/proc/self/environ').read_text().split(chr(0))[0])"
    )
    started = start([sys.executable, "-c", script], {"FIRST": "1", **os.environ}, tmp_path / "log")
    started.popen.wait(timeout=30)
    started.end()
    assert (tmp_path / "log").read_text(encoding="utf-8") == "FIRST=1\n", (
        "setproctitle may fail with another one"
    )


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
        start([sys.executable, "-c", "pass"], os.environ, tmp_path / "log")
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
