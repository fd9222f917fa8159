"""Process that plays cases on vLLM's EngineCore, and what its end means.

A hang or a signal (SIGSEGV, SIGABRT) is a finding about vLLM. A Python exception that ends the
process is a fault of the program in it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from vllm_repro.errors import HarnessBug, InfraError, Unsupported
from vllm_repro_explore.case import Case
from vllm_repro_explore.finding import ENDLESS, Finding, FindingKind, PlayResult, result_from

CASE_S = 120.0
"""Seconds after which a case counts as hung, by default."""
_BOOT_S = 300.0
_EXIT_S = 60.0
"""Seconds that an exiting process has to write its traceback and unload torch."""
_RENEWED = 2000
"""Cases per process; a restart frees the memory that vLLM never frees."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # vLLM waits minutes for a hub that does not answer
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TRITON_INTERPRET": "1",  # `model_runner` runs copies of states in it
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
}
"""Environment variables of the process."""


class CaseProcess:
    """Process that plays cases on the EngineCore of one vLLM. A context manager.

    It starts with the first case, and again after 2000 cases, a hang or a crash.

    - start: starts the program `serve` with a log for its standard error; returns the process, a
      `Popen` or what has its members stdin, stdout, wait and kill
    - errors: that log
    - case_s: seconds after which a case counts as hung
    - vllm: name of the vLLM, for messages

    Playing raises `Unsupported` if the release lacks what the program needs, and `InfraError` if
    the process does not start.
    """

    def __init__(
        self,
        start: Callable[[IO[bytes]], Any],
        errors: Path,
        *,
        case_s: float = CASE_S,
        vllm: str = "vLLM",
    ) -> None:
        self._start_process, self._errors, self.case_s, self._vllm = start, errors, case_s, vllm
        self._process: Any = None
        self._played = 0
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def play(self, case: Case, worker: str = "") -> PlayResult:
        """Run a case on EngineCore and return its result; a hang or a signal is a finding.

        worker: "" for the simulated worker below it, "runner" for the release's own CPU model
        runner, "both" to compare the two. Raises `HarnessBug` if the program failed by itself, and
        `InfraError` if the process got SIGKILL.
        """
        if self._process is None or self._played >= _RENEWED:
            self.close()
            self._start()
        self._played += 1
        with contextlib.suppress(BrokenPipeError):  # it exited; the missing answer is handled below
            self._process.stdin.write(
                json.dumps({**case.as_json(), "worker": worker}).encode() + b"\n"
            )
            self._process.stdin.flush()
        line = self._line(self.case_s)
        if line:
            return result_from(json.loads(line))
        if line is None:
            self.close()
            detail = f"no answer within {self.case_s:.0f} s"
            finding = Finding(kind=FindingKind.STUCK, site=ENDLESS, detail=detail)
        else:
            site, detail = f"the process ended by {self._signal()}", f"see {self._errors.name}"
            finding = Finding(kind=FindingKind.DEATH, site=site, detail=detail)
        return PlayResult(findings=(finding,))

    def _signal(self) -> str:
        """Wait for the process to exit, and return the name of the signal that ended it.

        Raises `HarnessBug` if no signal ended it, and `InfraError` if it got SIGKILL, which `close`
        sends after 60 s.
        """
        status = self.close(within_s=_EXIT_S)
        log = f"read its log: {self._errors}"
        if status is None or status >= 0:
            raise HarnessBug(
                f"the program that plays the cases failed (exit status {status})", hint=log
            )
        if status == -signal.SIGKILL:
            raise InfraError(
                "the process that plays the cases was killed",
                hint="free memory and repeat the command",
            )
        return signal.Signals(-status).name

    def close(self, *, within_s: float = 2) -> int | None:
        """Stop the process by closing its input; kill it after `within_s` seconds.

        Return its exit status; None if it does not run.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        with contextlib.suppress(BrokenPipeError):  # unsent input is of no use
            process.stdin.close()
        try:
            return int(process.wait(timeout=within_s))
        except subprocess.TimeoutExpired:
            process.kill()
            return int(process.wait())
        finally:
            process.stdout.close()

    def _start(self) -> None:
        """Start the process and wait for its first line, the release of vLLM.

        Raises `Unsupported` if the release lacks what the program needs, and `InfraError` if the
        process exits or writes nothing within 300 s.
        """
        with self._errors.open("ab") as errors:
            self._process = self._start_process(errors)
        self._played, self._buffer = 0, b""
        line = self._line(_BOOT_S)
        first = json.loads(line) if line else {}
        if lacking := first.get("unsupported"):
            self.close()
            raise Unsupported(
                f"{self._vllm} cannot be explored: {lacking}", hint="use another release"
            )
        if "version" not in first:
            self.close()
            raise InfraError(
                f"{self._vllm}'s EngineCore did not start", hint=f"read its log: {self._errors}"
            )

    def _line(self, most: float) -> bytes | None:
        """Return the process's next output line; empty if it exited, None after `most` seconds."""
        until = time.monotonic() + most
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = until - time.monotonic()
                if left <= 0 or not selector.select(left):
                    return None
                piece = os.read(self._process.stdout.fileno(), 65536)
                if not piece:
                    return b""
                self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line
