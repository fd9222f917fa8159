"""Process on a release's interpreter that plays cases on vLLM's EngineCore.

A hang or a signal (SIGSEGV, SIGABRT) is a finding about vLLM. A Python exception that ends the
process is a fault of this package.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Collection
from pathlib import Path

from vllm_repro.errors import HarnessBug, InfraError, Unsupported
from vllm_repro.releases.disk import cache_root
from vllm_repro.releases.provision import Release
from vllm_repro.releases.tiny_model_folder import cached_model
from vllm_repro.servers.lab import plugin_folder
from vllm_repro.servers.launch import CPU_ENV, OFFLINE_ENV
from vllm_repro.servers.witness import PLUGIN, witness_env
from vllm_repro.tiny_model import TinyModel
from vllm_repro_explore.case import Case
from vllm_repro_explore.finding import ENDLESS, Finding, FindingKind, PlayResult, result_from
from vllm_repro_explore.forks import Forked, fork

PROGRAM = Path(__file__).resolve().parent / "program"
_BOOT_S = 300.0
_CASE_S = 120.0
_POSITIONS = 1_048_576
_EXIT_S = 60.0
"""Seconds that an exiting process has to write its traceback and unload torch."""
_RENEWED = 2000
"""Cases per process; a restart frees the memory that vLLM never frees."""


class Driver(contextlib.AbstractContextManager["Driver"]):
    """Process that plays cases: runs them on one release's EngineCore. A context manager.

    It starts with the first case, and again after 2000 cases, a hang or a crash.

    - model: folder whose config vLLM reads unless a case has Mamba layers
    - errors: log file of the process
    - case_s: seconds after which a case counts as hung
    - patched: files whose import `errors` reports
    - probes: JSON file of the statements to count, see `program/vllm_repro_driver/probe.py`

    Playing raises `Unsupported` if the release lacks what the driver needs, and `InfraError` if
    the process does not start.
    """

    def __init__(
        self,
        release: Release,
        model: Path,
        errors: Path,
        *,
        case_s: float = _CASE_S,
        patched: Collection[str] = (),
        probes: Path | None = None,
    ) -> None:
        self._probes = probes
        self._release, self._model, self._errors, self._patched = release, model, errors, patched
        self._case_s = case_s
        self._process: Forked | None = None
        self._played = 0
        self._buffer = b""

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
        assert self._process is not None
        self._played += 1
        with contextlib.suppress(BrokenPipeError):  # it exited; the missing answer is handled below
            self._process.stdin.write(
                json.dumps({**case.as_json(), "worker": worker}).encode() + b"\n"
            )
            self._process.stdin.flush()
        line = self._line(self._case_s)
        if line:
            return result_from(json.loads(line))
        if line is None:
            self.close()
            detail = f"no answer within {self._case_s:.0f} s"
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
            return process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
        finally:
            process.stdout.close()

    def _start(self) -> None:
        """Start the process and wait for its first line, the release of vLLM.

        Raises `Unsupported` if the release lacks what the program needs, and `InfraError` if the
        process exits or writes nothing within 300 s.
        """
        with self._errors.open("ab") as errors:
            python, environment = self._release.python, self.environment()
            self._process = fork(python, "vllm_repro_driver", env=environment, errors=errors)
        self._played, self._buffer = 0, b""
        line = self._line(_BOOT_S)
        first = json.loads(line) if line else {}
        if lacking := first.get("unsupported"):
            self.close()
            raise Unsupported(
                f"vLLM {self._release.version} cannot be explored: {lacking}",
                hint="--vllm names another release",
            )
        if "version" not in first:
            self.close()
            raise InfraError(
                f"vLLM {self._release.version}'s EngineCore did not start",
                hint=f"read its log: {self._errors}",
            )

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the process."""
        kept = {"PATH", "HOME", "TMPDIR", "LANG"} & os.environ.keys()
        path = map(str, (PROGRAM, PLUGIN, plugin_folder(), self._release.packages))
        mamba = TinyModel(family="granite_hybrid", kinds=("mamba", "full"), max_position=_POSITIONS)
        return {
            **{name: os.environ[name] for name in kept},
            **CPU_ENV,
            **OFFLINE_ENV,
            **witness_env(self._patched, *path),
            **({"REPRO_PROBE": str(self._probes)} if self._probes else {}),
            "PYTHONSAFEPATH": "1",
            "PYTHONHASHSEED": "0",
            "NUMBA_CACHE_DIR": str(cache_root() / "numba"),
            "OMP_NUM_THREADS": "1",
            "TRITON_INTERPRET": "1",  # `model_runner` runs copies of states in it
            "VLLM_PLUGINS": "",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "REPRO_DRIVER_MODEL": str(self._model),
            "REPRO_DRIVER_MAMBA_MODEL": str(cached_model(mamba)),
        }

    def _line(self, most: float) -> bytes | None:
        """Return the process's next output line; empty if it exited, None after `most` seconds."""
        assert self._process is not None
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


def driver_model() -> Path:
    """Return a model folder that every release treats as a hybrid model; make it on first use.

    The layers in its config do not count: each case names its own.
    """
    return cached_model(
        TinyModel(family="gemma3", kinds=("full", "sliding"), window=128, max_position=_POSITIONS)
    )
