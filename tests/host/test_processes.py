from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from vllm_repro.errors import InfraError
from vllm_repro.host.processes import end_orphan_sessions, orphan_sessions, session_members, start, state_folder

# A leader with a child that ignores SIGTERM and leaves the process group, as a stubborn worker might.
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
    assert len(session_members(started.id)) == 2
    assert started.record.exists()
    started.end(grace=0.5)
    assert session_members(started.id) == []
    assert list(state_folder().iterdir()) == []
    started.end()  # a second time is harmless


def test_output_of_a_process_that_dies_at_once_is_whole(tmp_path: Path) -> None:
    script = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    started = start([sys.executable, "-c", script], os.environ, tmp_path / "log")
    assert started.popen.wait(timeout=30) == 3
    started.end()
    assert set((tmp_path / "log").read_text(encoding="utf-8").split()) == {"out", "err"}


def test_what_cannot_be_started_leaves_no_record(tmp_path: Path) -> None:
    with pytest.raises(InfraError, match="cannot start /nowhere/vllm"):
        start(["/nowhere/vllm"], os.environ, tmp_path / "log")
    assert list(state_folder().iterdir()) == []


def test_a_damaged_record_is_skipped() -> None:
    state_folder().mkdir(parents=True)
    (state_folder() / "x.json").write_text('{"owner": {"pid": 1', encoding="utf-8")
    assert orphan_sessions() == []


def killed_session(tmp_path: Path) -> int:
    """Return the id of a session whose owner was killed right after `start`."""
    script = (
        "import os, sys, signal, pathlib; from vllm_repro.host.processes import start; "
        f"s = start([sys.executable, '-c', {STUBBORN!r}], os.environ, pathlib.Path({str(tmp_path / 'log')!r})); "
        "print(s.id, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_for("up", tmp_path / "log")
    return int(done.stdout)


def test_the_orphans_of_a_killed_owner_are_found_and_ended(tmp_path: Path) -> None:
    session = killed_session(tmp_path)
    (orphan,) = orphan_sessions()
    assert orphan.session == session
    assert str(os.getpid()) not in str(orphan)
    assert f"in {Path.cwd()}: {sys.executable}" in str(orphan), "the line says whose it is"
    assert set(orphan.pids) == {process.pid for process in session_members(session)}
    end_orphan_sessions([orphan])
    assert session_members(session) == []
    assert orphan_sessions() == []
    assert list(state_folder().iterdir()) == []


def forge(record: Path, *, session: int | None = None, **owner: object) -> None:
    """Change a record in place."""
    first, _, second = record.read_text(encoding="utf-8").partition("\n")
    data = json.loads(first)
    data["owner"] |= owner
    record.write_text(f"{json.dumps(data)}\n{session or second}", encoding="utf-8")


@pytest.fixture
def bystander() -> Iterator[int]:
    """Return the session id of a process that is not ours."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield process.pid
    process.kill()
    process.wait()


def test_a_session_number_that_was_given_to_somebody_else_is_left_alone(tmp_path: Path, bystander: int) -> None:
    session = killed_session(tmp_path)
    (record,) = state_folder().glob("*.json")
    for process in session_members(session):
        process.kill()
    forge(record, session=bystander)
    (orphan,) = orphan_sessions()
    assert orphan.pids == ()
    end_orphan_sessions([orphan])
    assert len(session_members(bystander)) == 1
    assert list(state_folder().iterdir()) == []


def test_after_a_reboot_the_numbers_in_a_record_mean_nothing(tmp_path: Path) -> None:
    session = killed_session(tmp_path)
    (record,) = state_folder().glob("*.json")
    before = record.read_text(encoding="utf-8")
    forge(record, boot="the boot before this one")
    (orphan,) = orphan_sessions()
    assert orphan.pids == ()
    record.write_text(before, encoding="utf-8")
    end_orphan_sessions(orphan_sessions())
    assert session_members(session) == []


def test_a_state_folder_that_cannot_be_written_is_trouble_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(InfraError, match="Not a directory") as refused:
        start([sys.executable, "-c", "pass"], os.environ, tmp_path / "log")
    assert f"cannot write to {state_folder()}," in str(refused.value)
    assert "set XDG_STATE_HOME" in refused.value.hint


def test_what_a_living_owner_runs_is_not_listed(tmp_path: Path) -> None:
    started = start([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, tmp_path / "log")
    try:
        assert orphan_sessions() == []
        assert psutil.pid_exists(started.popen.pid)
    finally:
        started.end(grace=1)
