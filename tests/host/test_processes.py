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
from vllm_repro.host.processes import list_left, remove_left, session_members, start, state_folder

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
    assert len(session_members(started.session)) == 2
    assert started.record.exists()
    started.end(grace=0.5)
    assert session_members(started.session) == []
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


def orphan(tmp_path: Path) -> int:
    """A session whose owner was killed before it could write anything but what `start` itself writes; returns its id."""
    script = (
        "import os, sys, signal, pathlib; from vllm_repro.host.processes import start; "
        f"s = start([sys.executable, '-c', {STUBBORN!r}], os.environ, pathlib.Path({str(tmp_path / 'log')!r})); "
        "print(s.session, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL, done.stderr
    wait_for("up", tmp_path / "log")
    return int(done.stdout)


def test_the_orphans_of_a_killed_owner_are_found_and_ended(tmp_path: Path) -> None:
    session = orphan(tmp_path)
    (left,) = list_left()
    assert left.session == session
    assert set(left.pids) == {process.pid for process in session_members(session)}
    remove_left([left])
    assert session_members(session) == []
    assert list_left() == []
    assert list(state_folder().iterdir()) == []


def test_a_record_cut_short_by_the_kill_still_names_the_session(tmp_path: Path) -> None:
    session = orphan(tmp_path)
    # What is on disk when the kill comes between the child's exec and the owner's second write of the record.
    (record,) = state_folder().glob("*.json")
    text = record.read_text(encoding="utf-8")
    record.with_suffix(".pid").write_text(str(session), encoding="utf-8")
    record.write_text(text.replace(f', "session": {session}', ""), encoding="utf-8")
    (left,) = list_left()
    assert left.session == session
    assert left.pids
    remove_left([left])
    assert session_members(session) == []


def forge(record: Path, **changes: object) -> None:
    """Changes a record in place, its owner's fields by their own names."""
    data = json.loads(record.read_text(encoding="utf-8"))
    for name, value in changes.items():
        (data["owner"] if name in data["owner"] else data)[name] = value
    record.write_text(json.dumps(data), encoding="utf-8")


@pytest.fixture
def bystander() -> Iterator[int]:
    """A session of somebody else's that began after our record was written, and has the number that ours had."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    yield process.pid
    process.kill()
    process.wait()


def test_a_session_number_that_was_given_to_somebody_else_is_left_alone(tmp_path: Path, bystander: int) -> None:
    session = orphan(tmp_path)
    (record,) = state_folder().glob("*.json")
    for process in session_members(session):
        process.kill()
    forge(record, session=bystander)
    (left,) = list_left()
    assert left.pids == ()
    remove_left([left])
    assert len(session_members(bystander)) == 1
    assert list(state_folder().iterdir()) == []


def test_after_a_reboot_the_numbers_in_a_record_mean_nothing(tmp_path: Path) -> None:
    session = orphan(tmp_path)
    (record,) = state_folder().glob("*.json")
    before = record.read_text(encoding="utf-8")
    forge(record, boot="the boot before this one")
    (left,) = list_left()
    assert left.pids == ()
    record.write_text(before, encoding="utf-8")
    remove_left(list_left())
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
        assert list_left() == []
        assert psutil.pid_exists(started.popen.pid)
    finally:
        started.end(grace=1)
