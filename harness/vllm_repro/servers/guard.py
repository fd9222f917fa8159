"""Guard: a small process per server that ends the server if the harness dies, also by SIGKILL."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

__all__ = ["Guard"]

# The kernel closes the harness's end of the pipe when the harness dies. Only then is the package imported, by a program that replaces
# this one. -P: nothing is imported from the working folder.
_PROGRAM = """
import os, sys
if not os.read(0, 1):
    python, owner = sys.argv[1:]
    os.execv(python, [python, "-P", "-m", "vllm_repro.servers.orphans", owner])
"""


class Guard:
    """Runs from its creation to `release`. It ends every server whose owner is this process, by record or label."""

    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, sys.executable, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """End the guard: the server is gone. May be called again."""
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # the guard was killed, or released before
            self._popen.stdin.write(b".")
            self._popen.stdin.close()
        self._popen.wait()
