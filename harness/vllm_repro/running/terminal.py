"""Progress of a run on standard error: a status line, or without a terminal plain lines."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, TextIO

from vllm_repro.report.format import seconds
from vllm_repro.report.text import printable
from vllm_repro.running.assess import Conclusion
from vllm_repro.scenario.scenario import Arm

if TYPE_CHECKING:
    from rich.status import Status

_EVERY = 30.0
"""Seconds between two lines without a terminal."""


class Progress:
    """Progress of a run on standard error: a status line, or plain lines without a terminal.

    `notify` may be called at any rate.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty() and not os.environ.get("CI")
        self._lock = threading.Lock()
        self._status: Status | None = None
        self._shown = time.monotonic()

    def notify(self, text: str) -> None:
        """Show `text`: at most ten times a second on a terminal, else a line every 30 seconds.

        Drop a text that comes sooner.
        """
        now = time.monotonic()
        with self._lock:
            if now - self._shown < (0.1 if self._live else _EVERY):
                return
            self._shown = now
            if self._live:
                self._show(text)
            else:
                self._write(text)

    def line(self, text: str) -> None:
        """Print a permanent line, after removing the status line."""
        with self._lock:
            self._hide()
            self._write(text)

    def done(self, arm: Arm, trial: int, conclusion: Conclusion) -> None:
        """Print the permanent line of a finished trial: its outcome and boot time."""
        boot = (
            f"boot {seconds(conclusion.boot_s)}" if conclusion.boot_s is not None else "not ready"
        )
        self.line(f"  {arm.name} {trial}: {conclusion.outcome} ({boot})")

    def close(self) -> None:
        """Remove the status line. Later calls of `notify` show it again."""
        with self._lock:
            self._hide()

    def _show(self, text: str) -> None:
        """Show `text` as the status line of the terminal."""
        from rich.console import Console  # here: 0.1 s of imports that only a terminal needs
        from rich.status import Status
        from rich.text import Text

        printable = Text(
            "".join(letter if letter.isprintable() else " " for letter in text), no_wrap=True
        )
        if self._status is None:
            self._status = Status(printable, console=Console(file=self._stream))
            self._status.start()
        else:
            self._status.update(printable)

    def _hide(self) -> None:
        """Remove the status line, if there is one."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _write(self, text: str) -> None:
        """Print one line and restart the time of `notify`; ignore a stream that is closed."""
        with contextlib.suppress(OSError):  # the reader is gone; the run continues
            self._stream.write(printable(text) + "\n")
            self._stream.flush()
        self._shown = time.monotonic()
