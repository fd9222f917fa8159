"""Processes from a fork server: like ones that `Popen` starts, whatever becomes of the server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import write_script
from vllm_repro_explore import forks
from vllm_repro_explore.forks import Forked, fork

SHOW = """
import json, os, signal, sys
signals = {int(number): str(signal.getsignal(number)) for number in signal.valid_signals()}
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "environment": dict(os.environ), "signals": signals,
    "files": sorted(os.listdir("/proc/self/fd")), "input": sys.stdin.read(), "path": sys.path,
    "main": sys.modules["__main__"].__file__,
}))
print("to the log", file=sys.stderr)
"""
ENDS = """
import os, signal, sys
word = sys.stdin.read()
if word == "raise": raise KeyError(word)
if word == "exit": sys.exit(3)
if word: os.kill(os.getpid(), int(word))
"""
WAITS = "import sys; sys.stdin.read()"


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., Forked]:
    """Return a function that starts a module of a text."""

    def start(text: str, **env: str) -> Forked:
        (tmp_path / "forked.py").write_text(text, encoding="utf-8")
        with (tmp_path / "log").open("ab") as log:
            return fork(Path(sys.executable), "forked", env=environment(tmp_path) | env, errors=log)

    return start


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": f"{folder}:/nowhere", "PYTHONSAFEPATH": "1"}


def ended(process: Forked, word: str = "") -> tuple[int, bytes]:
    with process.stdin, process.stdout:
        process.stdin.write(word.encode())
        process.stdin.close()
        return process.wait(timeout=30), process.stdout.read()


def server() -> psutil.Process:
    """Return the newest server."""
    *_, newest = forks._servers.values()
    return psutil.Process(newest._process.pid)


@pytest.fixture(
    params=[signal.default_int_handler, signal.SIG_IGN], ids=["foreground", "background"]
)
def interrupt(request: pytest.FixtureRequest) -> Iterator[None]:
    """Handle SIGINT like a shell's foreground job, or ignore it like a background job."""
    before = signal.signal(signal.SIGINT, request.param)
    forks._close()  # servers that handle it otherwise
    yield
    forks._close()
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupt")
def test_a_fork_is_as_a_process_of_its_own(
    begin: Callable[..., Forked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(begin(WAITS))  # the server begins elsewhere
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    status, out = ended(begin(SHOW, REPRO_PATCHED="a.py"), "hello")
    started = subprocess.run(
        [sys.executable, "-m", "forked"],
        env=environment(tmp_path) | {"REPRO_PATCHED": "a.py"},
        input=b"hello",
        capture_output=True,
        check=True,
    )
    shown: dict[str, Any] = json.loads(out)
    assert (status, shown["input"]) == (0, "hello")
    assert shown == json.loads(started.stdout)
    assert (tmp_path / "log").read_bytes().endswith(b"to the log\n")


STATUSES = {"": 0, "exit": 3, "raise": 1, "2": -signal.SIGINT, "11": -signal.SIGSEGV}


@pytest.mark.parametrize("word", STATUSES)
@pytest.mark.parametrize(
    "interrupt", [signal.default_int_handler], indirect=True, ids=["foreground"]
)
@pytest.mark.usefixtures("interrupt")
def test_a_status_is_that_of_popen(begin: Callable[..., Forked], word: str, tmp_path: Path) -> None:
    assert ended(begin(ENDS), word)[0] == STATUSES[word]
    log = (tmp_path / "log").read_text(encoding="utf-8")
    assert ("KeyError: 'raise'" in log) == (word == "raise")


def test_starts_of_one_environment_share_a_server(begin: Callable[..., Forked]) -> None:
    before = set(forks._servers.values())
    pids = []
    for other in ("", "", "1", "2"):
        ended(begin(WAITS, OTHER=other))
        pids.append(server().pid)
    assert (pids[0], len(set(pids))) == (pids[1], 3)
    assert len(forks._servers) == forks._MOST
    assert not before & set(forks._servers.values())
    assert not psutil.pid_exists(pids[0])


def test_a_killed_server_leaves_its_processes_and_is_replaced(begin: Callable[..., Forked]) -> None:
    first = begin(WAITS)
    lost = server()
    lost.kill()
    lost.wait()
    assert (ended(begin(WAITS))[0], ended(first)[0]) == (0, 0)


def test_a_hanging_process_can_be_waited_for_and_killed(
    begin: Callable[..., Forked],
) -> None:
    process = begin(WAITS)
    with process.stdin, process.stdout:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.kill()  # its id may be another's by now


def test_a_server_that_does_not_start_reads_as_a_killed_process(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = fork(Path("/bin/false"), "forked", env=environment(tmp_path), errors=log)
    assert process.pid is None
    assert ended(process) == (-signal.SIGKILL, b"")


THREAD = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"


@pytest.mark.parametrize("text", ["", THREAD])
def test_packages_that_start_no_thread_are_imported_once(text: str, tmp_path: Path) -> None:
    package = tmp_path / "site" / "torch" / "_inductor"
    package.mkdir(parents=True)
    (package / "lowering.py").write_text(text, encoding="utf-8")
    start = f'PYTHONPATH={tmp_path}/site exec {sys.executable} "$@"'
    python = write_script(tmp_path / "python", start)
    asks = "import sys; print('torch' in sys.modules)"
    (tmp_path / "forked.py").write_text(asks, encoding="utf-8")
    env = environment(tmp_path) | {"OMP_NUM_THREADS": "1"}  # else NumPy starts one
    with (tmp_path / "log").open("wb") as log:
        process = fork(python, "forked", env=env, errors=log)
    assert ended(process) == (0, f"{not text}\n".encode())


def test_nothing_is_left_of_a_killed_harness(tmp_path: Path) -> None:
    (tmp_path / "forked.py").write_text(WAITS, encoding="utf-8")
    program = f"""
import sys, time
from pathlib import Path
from vllm_repro_explore import forks
with open("log", "ab") as log:
    process = forks.fork(Path(sys.executable), "forked", env={environment(tmp_path)}, errors=log)
(server,) = forks._servers.values()
print(process.pid, server._process.pid, flush=True)
time.sleep(60)
"""
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        left = [psutil.Process(int(word)) for word in harness.stdout.readline().split()]
        harness.kill()
    assert len(left) == 2
    for process in left:
        process.wait(timeout=30)
