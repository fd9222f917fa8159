"""What a run shows on the terminal: one line that says what it waits for and since when, and a table at the end.

Progress goes to standard error and only to a terminal: in CI, and in a pipe, a run is quiet until a trial is over.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import threading
import time
from typing import TextIO

from vllm_repro.report.budget import held
from vllm_repro.report.model import RunReport
from vllm_repro.report.patched import untried_in
from vllm_repro.report.speed import speed_lines
from vllm_repro.report.wording import (
    boundary,
    columns,
    death_line,
    engine_word,
    folded,
    outcome_word,
    outlasted_line,
    refusals,
    seconds,
    unrun_word,
)
from vllm_repro.running.assess import Conclusion
from vllm_repro.scenario.scenario import Arm

__all__ = ["Progress", "summary"]

_CAUSE = 4_000


class Progress:
    """One status line, redrawn; `say` may be called as often as one likes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty() and not os.environ.get("CI")
        self._lock = threading.Lock()
        self._drawn = 0.0
        self._text = ""

    def say(self, text: str) -> None:
        """Shows `text` in place of the last one; at most ten times a second."""
        if not self._live:
            return
        now = time.monotonic()
        with self._lock:
            if text == self._text or now - self._drawn < 0.1:
                return
            self._text, self._drawn = text, now
            width = shutil.get_terminal_size().columns - 1
            printable = "".join(letter if letter.isprintable() else " " for letter in text)
            self._stream.write("\r\x1b[2K" + printable[:width])
            self._stream.flush()

    def line(self, text: str) -> None:
        """A line that stays."""
        with self._lock:
            if self._live:
                self._stream.write("\r\x1b[2K")
            self._stream.write(text + "\n")
            self._stream.flush()

    def done(self, arm: Arm, trial: int, conclusion: Conclusion) -> None:
        """One line a trial, as it ends."""
        boot = f"boot {seconds(conclusion.boot_s)}" if conclusion.boot_s is not None else "not ready"
        self.line(f"  {arm.name} {trial}: {conclusion.outcome} ({boot})")

    def close(self) -> None:
        if self._live:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()


def summary(report: RunReport) -> str:
    """The end of a run: few lines, each a fact, the cause near the end, then the verdict and the next step."""
    lines: list[str] = []
    expected = {True: "as expected", False: "a SURPRISE", None: "undecided"}[report.verdict.expected]
    version = f"{'REHEARSAL of ' if report.rehearsal else ''}vLLM {report.version or '?'}"
    lines += [f"{report.scenario}   {report.issue}   {version}   declared: {report.status}", ""]
    rows: list[tuple[str, ...]] = [("arm", "boot", "boundary", "engine", "outcome")]
    for arm in report.arms:
        for trial, times in folded(arm.trials):
            said = outcome_word(trial) + times
            rows.append((arm.name, seconds(trial.boot_s), boundary(trial), engine_word(trial), said))
        if not arm.trials:
            rows.append((arm.name, "", "", "", unrun_word(arm)))
    lines += columns(rows, (24, 8, 60, 28, 32))
    for arm in report.arms:
        found = {changed["file"]: "".join(untried_in(changed)) for changed in arm.server.get("patched") or ()}
        lines += [f"changed in {arm.name}: {file}{untried}" for file, untried in found.items()]
    lines += refusals(report.arms)
    telling = [trial for _, trial in report.failures] or [
        trial for arm in report.arms for trial in arm.trials if trial.outcome not in ("clean", "untriggered")
    ]
    if telling:
        lines += ["", held(telling[0].why, _CAUSE)]
        if seen := death_line(telling[0]):
            lines.append(f"  {seen}")
        if stayed := outlasted_line(telling[0]):
            lines.append(f"  {stayed}")
    folder = shlex.quote(str(report.folder))
    lines += speed_lines(report.measured, rehearsal=report.rehearsal)
    lines += [
        "",
        f"verdict: {report.verdict.verdict}{' (REHEARSAL)' if report.rehearsal else ''}, {expected}",
        f"         {report.verdict.because}",
        *(f"         {text}" for text in report.comparisons),
        f"report:  {report.folder / 'report.md'}   page: report.html",
        *(f"draft:   vllm-repro draft {folder}" for _ in range(not report.rehearsal)),
        f"again:   {report.reproduce}",
    ]
    if report.shortfall and not report.interrupted:
        lines.append(f"{report.shortfall}; this is what it holds")
    if report.interrupted:
        lines += [
            f"interrupted by {report.interrupted}; nothing is left running",
            f"go on:   vllm-repro run --resume {folder}",
        ]
    return "\n".join(lines)
