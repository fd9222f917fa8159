"""Signs of life and death of an engine in its log, each with its line.

Signs are only collected here; `vllm_repro.diagnosis.judgement` decides what they mean together. A sign stands at the
beginning of a message: a prompt that quotes `EngineDeadError` is none.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from vllm_repro.diagnosis.boot_facts import BootReader
from vllm_repro.diagnosis.engine_code import LOOPS
from vllm_repro.diagnosis.log_text import Line
from vllm_repro.diagnosis.tracebacks import Finder, Unfinished

__all__ = ["ServerLife", "Sign", "SignKind"]


class SignKind(StrEnum):
    """The meaning of a sign."""

    FATAL = "fatal"  # logged by EngineCore as it dies
    BOOT_FAILED = "boot-failed"
    WORKER_EXCEPTION = "worker-exception"
    WORKER_DIED = "worker-died"  # a worker process is gone without an exception
    ENGINE_GONE = "engine-gone"  # the API server missed EngineCore before anybody asked it to stop
    ENGINE_DEAD = "engine-dead"  # EngineDeadError, or its text in an answer
    NATIVE_CRASH = "native-crash"
    HEALTH_503 = "health-503"
    SERVER_ERROR = "server-error"  # a request was answered with 5xx
    DUMP = "scheduler-dump"
    PARENT_GONE = "parent-gone"  # a worker outlived the process that had started it
    STALLED = "stalled"  # requests in flight and no tokens
    STOP_ASKED = "stop-asked"  # the API server logs a request to stop
    ENGINE_TOLD = "engine-told-to-stop"  # EngineCore logs a request to stop
    WORKER_TOLD = "worker-told-to-stop"  # a worker logs that a signal ended it
    SHUTDOWN = "shutdown"  # logged by uvicorn after a request to stop and after a death
    DRAINING = "draining"  # it stops, and waits for open requests
    CLOSED = "closed"
    OOM_KILLED = "oom-killed"  # the kernel killed a process of this server
    OOM_NAMED = "oom-named"  # the kernel killed a process named like vLLM's, with an unknown pid
    READY = "ready"
    USAGE = "usage"  # the command line was refused


@dataclass(frozen=True, slots=True)
class Sign:
    kind: SignKind
    line: int
    text: str


_STARTS: tuple[tuple[str, SignKind], ...] = (
    ("EngineCore failed to start.", SignKind.BOOT_FAILED),
    ("WorkerProc failed to start.", SignKind.BOOT_FAILED),
    ("RuntimeError: Engine core initialization failed", SignKind.BOOT_FAILED),
    ("RuntimeError: Engine process failed to start", SignKind.BOOT_FAILED),
    ("WorkerProc hit an exception.", SignKind.WORKER_EXCEPTION),
    ("[shutdown] MPClient: engine core exited unexpectedly", SignKind.ENGINE_GONE),
    ("AsyncLLM output_handler failed.", SignKind.ENGINE_DEAD),
    ("!!!!!!! Segfault encountered", SignKind.NATIVE_CRASH),
    ("Fatal Python error: ", SignKind.NATIVE_CRASH),
    ("terminate called after throwing an instance of ", SignKind.NATIVE_CRASH),
    ("Dumping scheduler output for model execution: ", SignKind.DUMP),
    ("Parent process exited, terminating worker", SignKind.PARENT_GONE),
    ("[shutdown] API server: ", SignKind.STOP_ASKED),
    ("[shutdown] EngineCore: ", SignKind.ENGINE_TOLD),  # a dying EngineCore logs none of these
    ("Shutdown initiated (timeout=", SignKind.ENGINE_TOLD),
    ("WorkerProc was terminated", SignKind.WORKER_TOLD),
    ("[shutdown] WorkerProc: terminated by shutdown signal", SignKind.WORKER_TOLD),
    ("Shutting down FastAPI HTTP server", SignKind.SHUTDOWN),
    ("Waiting for connections to close.", SignKind.DRAINING),
    ("Application shutdown complete.", SignKind.CLOSED),
    ("Application startup complete.", SignKind.READY),
    ("usage: vllm", SignKind.USAGE),
)
_ENGINE = ("EngineCore", "Worker", "VllmWorker", "RayWorker")
_FATAL = "EngineCore encountered a fatal error."
_FIRST_LETTERS = frozenset(start[0] for start, _ in _STARTS)
_GONE = re.compile(r"(?:Worker proc \S+|RayWorkerProc rank=\S+) died unexpectedly")
_ENGINE_GONE = re.compile(r"Engine core proc \S+ died unexpectedly")
_EXIT_DEAD = re.compile(r"(?:[\w.]+\.)?EngineDeadError: (?=Engine)")  # with its own text; else it is prose
_ACCESS = re.compile(r'\S+ - "([A-Z]+) (\S+) HTTP/[\d.]+" (\d{3})\b')
_OOM = re.compile(r"\bout of memory: Killed process (\d{1,10}) \(([^)\n]{1,64})\)", re.IGNORECASE)
_REFUSED = re.compile(r"vllm(?: serve)?: error: ")
_STATS = re.compile(
    r"Engine (\d+): Avg prompt throughput: ([\d.]+) tokens/s, Avg generation throughput: ([\d.]+) tokens/s, "
    r"Running: (\d+) reqs, Waiting: (\d+) reqs"
)
# In a pasted text without a log, the reporter's prose may name a death. Only vLLM's own sentences count, beside a traceback.
_NAMED = "EngineDeadError"
_QUOTED = re.compile(
    r"EngineCore encountered a(?:n issue| fatal error)|EngineCore failed to start|Engine core initialization failed"
)

_KEPT = 3
_SURVIVED = 3
"""Answers after an unfinished traceback that prove the engine survived it; fewer may have been in flight."""
_TEXT = 300


class ServerLife:
    """One life of a server, read line by line: its signs, exceptions and boot facts."""

    stopping = frozenset({SignKind.STOP_ASKED, SignKind.SHUTDOWN, SignKind.ENGINE_TOLD})

    def __init__(self) -> None:
        self.finder = Finder()
        self.boot = BootReader()
        self.first: dict[SignKind, Sign] = {}
        self.kept: list[Sign] = []
        self.mentioned: str | None = None
        """The first mention of a death in lines without a server's prefix: the exception, or a sentence of vLLM's."""
        self.quoted = False
        """Such a line holds a sentence of vLLM's."""
        self.booted = False
        """The log has a server's first lines."""
        self.served = False
        """The server answered or counted requests, so it had booted."""
        self.usage: str | None = None
        """argparse's error, if the command line was refused."""
        self.headless = False
        self.pids: dict[int, str] = {}
        """Names of the processes in the log, by pid."""
        self.api_pid: int | None = None
        """The pid in the first line of the boot."""
        self.first_engine_line: int | None = None
        """The first line number of EngineCore."""
        self.engine_error = False
        """EngineCore or a worker logged an error."""
        self.lines = 0
        self.logged = 0
        self.stalls: dict[str, Sign | None] = {}
        self.busy: dict[str, bool] = {}
        self._begun: dict[str, str] = {}
        self._answers: deque[int] = deque(maxlen=_SURVIVED)
        self._counts: dict[SignKind, int] = {}

    def __contains__(self, kind: SignKind) -> bool:
        return kind in self.first

    def line_of(self, kind: SignKind) -> int | None:
        sign = self.first.get(kind)
        return None if sign is None else sign.line

    @property
    def is_log(self) -> bool:
        """Return True if most lines have a server's prefix: a log, not prose."""
        return self.logged * 2 >= self.lines and self.logged > 0

    @property
    def ready(self) -> bool:
        return self.served or SignKind.READY in self.first

    @property
    def stalled(self) -> Sign | None:
        return next((sign for sign in self.stalls.values() if sign is not None), None)

    def ended_by(self, line: Line) -> bool:
        """Return True if another server's log begins with this line.

        The one before was ready or had ended, or began with the same words, which a server logs once. A line that a
        collector wrote twice is no beginning.
        """
        if (first_words := begins(line)) is None:
            return False
        # Ranks started by a launcher each log their arguments, without a pid.
        again = self._begun.get(first_words, line.raw) != line.raw and line.pid is not None
        return again or self.ready or SignKind.SHUTDOWN in self or SignKind.BOOT_FAILED in self

    @property
    def cut_inside(self) -> Unfinished | None:
        """Return the engine's traceback in which this log ends, unless requests were answered after it."""
        answered = self._answers[0] if len(self._answers) == _SURVIVED else 0
        for one in self.finder.unfinished():
            engine = one.process.startswith(_ENGINE) or (not one.process and not LOOPS.isdisjoint(one.functions))
            if engine and one.last_line > answered:
                return one
        return None

    def feed(self, line: Line) -> None:
        text = line.text
        self.finder.feed(line)
        self.boot.feed(line)
        if text.strip():
            self.lines += 1
            self.logged += bool(line.level or line.process)
        if line.pid is not None:
            self.pids[line.pid] = line.process
        if first_words := begins(line):
            self.booted = True
            self._begun[first_words] = line.raw
            self.api_pid = line.pid
            self.first.pop(SignKind.HEALTH_503, None)  # another server or a proxy answered before
        if line.process.startswith(_ENGINE):
            self._take_engine_line(line)
        if line.process == "MainProcess":
            self.headless = True
        if not line.level and not line.process:
            self._mention(text)
        if (kind := self._kind(line)) is not None:
            self._add(Sign(kind, line.number, text.strip()[:_TEXT]))

    def _take_engine_line(self, line: Line) -> None:
        if self.first_engine_line is None and line.process.startswith("EngineCore"):
            self.first_engine_line = line.number
        if line.level in ("ERROR", "CRITICAL"):
            self.engine_error = True

    def _mention(self, text: str) -> None:
        if not self.quoted and "ngine" in text and (found := _QUOTED.search(text)):
            self.quoted = True
            self.mentioned = self.mentioned or f'"{found[0]}"'
        elif self.mentioned is None and _NAMED in text:
            self.mentioned = _NAMED

    def _kind(self, line: Line) -> SignKind | None:
        text = line.text
        first = text[:1]
        if text.startswith(_FATAL) and (line.level or text.rstrip() == _FATAL):
            return SignKind.FATAL
        if first in _FIRST_LETTERS:
            for start, kind in _STARTS:
                if text.startswith(start):
                    return kind
        if found := _ACCESS.match(text):
            self.served = True
            return self._access(found[1], found[2], found[3], line.number)
        if text.startswith("Engine ") and (found := _STATS.match(text)):
            self._stats(found, line)
        if _GONE.match(text):
            return SignKind.WORKER_DIED
        if _ENGINE_GONE.match(text):
            return SignKind.ENGINE_GONE
        if _EXIT_DEAD.match(text):
            return SignKind.ENGINE_DEAD
        if "Killed process " in text and not line.level and (found := _OOM.search(text)):
            return self._out_of_memory(int(found[1]), found[2])
        if _REFUSED.match(text):
            self.usage = self.usage or text.strip()[:_TEXT]
            return SignKind.USAGE
        if text.rstrip() == "Shutting down" and line.level:
            return SignKind.SHUTDOWN
        if line.process == "MainProcess" and text.startswith("[shutdown] Executor: "):
            return SignKind.SHUTDOWN  # a headless rank has no API server to log it
        return None

    def _access(self, method: str, path: str, status: str, number: int) -> SignKind | None:
        health = path.startswith("/health")
        if status[0] == "2" and (health or method == "POST"):
            self._answers.append(number)
            self.first.pop(SignKind.HEALTH_503, None)  # a dead engine answers nothing
        if health:
            return SignKind.HEALTH_503 if status == "503" else None
        return SignKind.SERVER_ERROR if method == "POST" and status[0] == "5" else None

    def _out_of_memory(self, pid: int, name: str) -> SignKind | None:
        if pid in self.pids:
            return SignKind.OOM_KILLED
        return SignKind.OOM_NAMED if name.startswith("VLLM::") else None

    def _stats(self, found: re.Match[str], line: Line) -> None:
        self.served = True
        engine = found[1]
        if not self.stopping.isdisjoint(self.first):
            return  # the API server keeps logging the last counts after its engine ended
        waiting = int(found[4]) + int(found[5]) > 0
        still = float(found[2]) == 0.0 and float(found[3]) == 0.0
        self.busy[engine] = waiting
        if not (waiting and still):
            self.stalls[engine] = None
        elif self.stalls.get(engine) is None:
            self.stalls[engine] = Sign(SignKind.STALLED, line.number, line.text.strip()[:_TEXT])

    def _add(self, sign: Sign) -> None:
        if sign.kind is SignKind.STOP_ASKED and "triggered" not in sign.text and sign.kind not in self.first:
            # The first of these lines is missing, so it stood before this part of the log.
            self.first[sign.kind] = Sign(sign.kind, 0, sign.text)
        self.first.setdefault(sign.kind, sign)
        count = self._counts[sign.kind] = self._counts.get(sign.kind, 0) + 1
        if count <= _KEPT:
            self.kept.append(sign)


_BEGINNINGS = ("non-default args: ", "vLLM API server version ", "Launching vLLM (")


def begins(line: Line) -> str | None:
    """Return the words with which a server begins to boot, if the line begins with them."""
    return next((words for words in _BEGINNINGS if line.text.startswith(words)), None)
