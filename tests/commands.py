"""The command in a process of its own, for tests that signal it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

SHORT_WAITS = {
    "vllm_repro.running.trial._SDK_TOTAL": 0.0,
    "vllm_repro.running.trial._NEEDED_LATER": (),
    "vllm_repro.running.trial._OUTLAST": 1.0,
    "vllm_repro.running.watch._LAST_LOOK_AT_VLLM": 0.1,
    "vllm_repro.running.watch._SETTLED": 0.1,
    "vllm_repro.running.workload._SIGN_AFTER_CANARY": 1.0,
    "vllm_repro.running.workload._SIGN_AFTER_FAILURE": 1.5,
    "vllm_repro.running.workload.IDLE_AFTER": 1.5,
    "vllm_repro.scenario.workload.IDLE_AFTER": 1.5,
    "vllm_repro_diagnosis.live._WINDOW": 1.2,
    "vllm_repro_diagnosis.live._TICK": 0.2,
}
"""After a crash or a wrong answer, and for idle. test_trial asks the SDK, with its retries."""

WITH_SHORT_WAITS = f"""
import importlib
for name, value in {SHORT_WAITS!r}.items():
    module, _, attribute = name.rpartition(".")
    setattr(importlib.import_module(module), attribute, value)
importlib.import_module("vllm_repro_diagnosis.live").stacks_of = lambda _: ()
"""
"""The fixture `short_waits` for a process of its own."""
QUICK = f"""
import sys
from vllm_repro.__main__ import main
{WITH_SHORT_WAITS}
sys.exit(main())
"""
"""The command without the SDK, whose import takes a second and which asks a dead engine longer."""


def started(
    out: Path, *words: str, before: Sequence[str] = (), piped: bool = False, **env: str
) -> subprocess.Popen[bytes]:
    """Start `vllm-repro` with reports in `out`.

    before: a command that runs it. piped: the caller reads what it prints.
    """
    return subprocess.Popen(
        [*before, sys.executable, "-c", QUICK, *words],
        env={**os.environ, "VLLM_REPRO_REPORTS": str(out), "CI": "true", **env},
        stdout=subprocess.PIPE if piped else subprocess.DEVNULL,
        stderr=subprocess.PIPE if piped else subprocess.DEVNULL,
        # A script's job in the background ignores it, and so would what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL),
    )


def write_script(path: Path, text: str) -> Path:
    """Write a shell script that can be started."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def interrupted(
    process: subprocess.Popen[bytes], number: signal.Signals, moment: str, out: Path
) -> tuple[int, Path]:
    """Signal the command at `moment` in its journal; return its status and its run's folder."""
    until(lambda: moment in "".join(journals(out)))
    return signalled(process, number, out)


def until(happened: Callable[[], object], *, seconds: float = 60) -> None:
    """Wait until `happened` returns something. A test fails by what it then looks at."""
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """Return False if the process is gone, or is a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def journals(out: Path) -> list[str]:
    """Return the journals of the runs in `out`."""
    return [path.read_text(encoding="utf-8") for path in out.glob("*/2*/journal.jsonl")]


def signalled(
    process: subprocess.Popen[bytes], number: signal.Signals, out: Path
) -> tuple[int, Path]:
    """Signal the command; return its status and the folder of its only run."""
    process.send_signal(number)
    status = process.wait(timeout=120)
    (folder,) = (path for path in out.glob("*/2*") if not path.is_symlink())
    return status, folder
