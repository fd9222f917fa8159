"""Programs that end with the process that runs them, however that one ends.

An installer that outlives its SIGKILLed parent would go on downloading, and write into what the next run removes. So it runs
below a guard: a few lines of Python that lead a session of their own and read from a pipe whose other end is ours. The
kernel closes ours with our last breath, and the guard then kills its whole group, so also what pip itself has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

__all__ = ["run_leashed"]

# It passes the program's exit status on, and dies of the signal that the program died of.
_GUARD = """
import os, signal, subprocess, sys, threading

def guard():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=guard, daemon=True).start()
status = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def run_leashed(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    tick_s: float = 5.0,
    tick: Callable[[Sequence[str]], None] = lambda _: None,
) -> tuple[int, str]:
    """Runs a program to its end: (exit status, or minus the signal that ended it; what it printed, both streams together).

    `tick` gets the lines so far every `tick_s` seconds. Whatever it raises, and an interrupt, ends the program too.
    """
    lines: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _GUARD, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
        reader.start()
        try:
            while True:
                try:
                    status = process.wait(timeout=tick_s)
                    break
                except subprocess.TimeoutExpired:
                    tick(lines)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):  # ended by itself just now
                os.killpg(process.pid, signal.SIGKILL)
            reader.join()  # ends when the last of the group has gone, and the caller may remove what they wrote to
            raise
        reader.join()
    return status, "".join(lines)
