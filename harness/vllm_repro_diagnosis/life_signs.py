"""Signs of life and death of an engine in its log, each with its line.

Signs are only collected here; `vllm_repro_diagnosis.judgement` decides what they mean together. A
sign stands at the beginning of a message: a prompt that quotes `EngineDeadError` is no sign.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, replace
from enum import StrEnum

from vllm_repro_diagnosis.boot_facts import BootReader
from vllm_repro_diagnosis.engine_code import LOOPS
from vllm_repro_diagnosis.log_text import Line
from vllm_repro_diagnosis.outside import COMMAND, PROMPT, Meaning, names_server, report_of
from vllm_repro_diagnosis.tracebacks import (
    API_SERVERS,
    ENGINE_CORES,
    ENGINE_NAMES,
    ERRORS,
    Finder,
    OpenTraceback,
)


class SignKind(StrEnum):
    """Sign of a server's life or death in a log line, such as a fatal error or readiness."""

    FATAL = "fatal"  # logged by EngineCore as it dies
    BOOT_FAILED = "boot-failed"
    WORKER_DIED = "worker-died"  # a worker process is gone without an exception
    ENGINE_GONE = "engine-gone"  # the API server missed EngineCore before anybody asked it to stop
    ENGINE_DEAD = "engine-dead"  # EngineDeadError, or its text in an answer
    NATIVE_CRASH = "native-crash"
    NO_HEARTBEAT = "no-heartbeat"  # the engine did not answer the API server, to 0.10
    HEALTH_503 = "health-503"
    SERVER_ERROR = "server-error"  # a request was answered with 5xx
    STREAM_FAILED = "stream-failed"  # a stream broke, whose status 200 was logged at its start
    DUMP = "scheduler-dump"
    PEER_LOST = "peer-lost"  # torch's store of another rank does not answer
    EARLIER = "earlier"  # an error that vLLM logs and goes on, and that may explain a later one
    STACK = "stack"  # a tool printed the stack of a living process
    PARENT_GONE = "parent-gone"  # a worker outlived the process that had started it
    PROCESS_DIED = "process-died"  # another process than EngineCore or a worker is gone
    INTERRUPTED = "interrupted"  # Ctrl-C on the server's terminal
    STOP_ASKED = "stop-asked"  # the API server logs a request to stop
    ENGINE_STOP_ASKED = "engine-stop-asked"  # EngineCore logs a request to stop
    WORKER_STOPPED = "worker-stopped"  # a worker logs that a signal ended it
    SHUTDOWN = "shutdown"  # logged by uvicorn after a request to stop and after a death
    DRAINING = "draining"  # it stops, and waits for open requests
    CLOSED = "closed"
    ERROR = "error"  # PyTorch or CUDA reports an error outside of a traceback
    PROGRAM_ENDED = "program-ended"  # a program that uses vLLM without a server
    OOM_KILLED = "oom-killed"  # the kernel killed a process of this server
    OOM_NAMED = "oom-named"  # the kernel killed a process named like vLLM's, with an unknown pid
    READY = "ready"


_DEATHS = frozenset(
    {
        *(SignKind.FATAL, SignKind.BOOT_FAILED, SignKind.WORKER_DIED),
        *(SignKind.ENGINE_GONE, SignKind.ENGINE_DEAD, SignKind.NATIVE_CRASH),
    }
)


AnySign = SignKind | Meaning
"""A sign that vLLM or the kernel logs, or the meaning of another program's report."""
_REFUTED: set[AnySign] = {*(*Meaning, SignKind.PEER_LOST, SignKind.ERROR, SignKind.INTERRUPTED)} - {
    Meaning.RUNNING
}
"""Signs that an answer or a token refutes if it comes later."""
_OTHERS = {*Meaning, SignKind.OOM_KILLED, SignKind.OOM_NAMED}
"""Lines of other programs than vLLM."""


@dataclass(frozen=True, slots=True)
class Sign:
    """The first log line that shows a sign: its number, text and time."""

    line: float
    text: str
    time: str = ""


THROWN = "terminate called after throwing an instance of "
HANDLER_FAILED = "AsyncLLM output_handler failed."
_STARTS: tuple[tuple[str, SignKind], ...] = (
    ("EngineCore failed to start.", SignKind.BOOT_FAILED),
    ("WorkerProc failed to start.", SignKind.BOOT_FAILED),
    ("RuntimeError: Engine core initialization failed", SignKind.BOOT_FAILED),
    ("RuntimeError: Engine process failed to start", SignKind.BOOT_FAILED),
    ("Exception: WorkerProc initialization failed", SignKind.BOOT_FAILED),
    ("[shutdown] MPClient: engine core exited unexpectedly", SignKind.ENGINE_GONE),
    # this and the next five to 0.10
    ("RuntimeError('Engine process (pid", SignKind.ENGINE_GONE),
    ("RuntimeError('Engine loop has died", SignKind.ENGINE_GONE),
    ("TimeoutError('No heartbeat received from MQLLMEngine", SignKind.NO_HEARTBEAT),
    ("MQLLMEngine is already dead", SignKind.ENGINE_DEAD),
    ("AsyncLLMEngine is already dead", SignKind.ENGINE_DEAD),
    ("AsyncLLMEngine has failed", SignKind.ENGINE_DEAD),
    (HANDLER_FAILED, SignKind.ENGINE_DEAD),
    ("!!!!!!! Segfault encountered", SignKind.NATIVE_CRASH),
    ("*** SIG", SignKind.NATIVE_CRASH),
    ("Fatal Python error: ", SignKind.NATIVE_CRASH),
    (THROWN, SignKind.NATIVE_CRASH),
    ("Dumping scheduler output for model execution: ", SignKind.DUMP),
    ("Dumping input data for V", SignKind.DUMP),
    ("Failed to import from vllm._C", SignKind.EARLIER),
    ("CUDA Error: out of memory at ", SignKind.EARLIER),
    ("Parent process exited, terminating worker", SignKind.PARENT_GONE),
    ("[shutdown] API server: ", SignKind.STOP_ASKED),
    ("[shutdown] EngineCore: ", SignKind.ENGINE_STOP_ASKED),  # not logged by a dying EngineCore
    ("Shutdown initiated (timeout=", SignKind.ENGINE_STOP_ASKED),
    ("WorkerProc was terminated", SignKind.WORKER_STOPPED),
    ("[shutdown] WorkerProc: terminated by shutdown signal", SignKind.WORKER_STOPPED),
    ("Shutting down FastAPI HTTP server", SignKind.SHUTDOWN),
    ("Waiting for connections to close.", SignKind.DRAINING),
    ("Application shutdown complete.", SignKind.CLOSED),
    ("Application startup complete.", SignKind.READY),
    ("[Errno 98] error while attempting to bind on address", SignKind.SHUTDOWN),
    ("Engine is gracefully shutting down.", SignKind.ENGINE_STOP_ASKED),  # to 0.7
)
_FATAL = (
    "EngineCore encountered a fatal error.",
    # this and the next two to 0.8
    "EngineCore hit an exception: ",
    "MulitprocExecutor got fatal signal from worker processes",
    "Got fatal signal from worker processes",
    # to 0.10
    "Engine background task failed",
    "Engine iteration timed out.",
)
_GLOG = r"(?:E\d{4}(?:\d{4})? \S+ \d+ [\w.]+:\d+\] )?"
_WORKER = r"(?:Worker proc \S+|RayWorkerProc rank=\S+) died unexpectedly"
_TOLD = r"(?:RuntimeError: |Exception occurred while running API servers: )?"
# a signal that asks to stop is no death
_WITH_CODE = r"(?:\(PID: \d+\) )?died(?! with exit code -(?:2|15)\b)"
_WORDINGS: tuple[tuple[str, SignKind], ...] = (
    *((re.escape(start), kind) for start, kind in _STARTS),
    (rf"{_WORKER} \(exit code: -(?:2|15)\)", SignKind.WORKER_STOPPED),
    (_WORKER, SignKind.WORKER_DIED),
    # to 0.10, which ends the other workers with -15
    (r"Worker \S+ pid \d+ died, exit code: (?!-15\b)", SignKind.WORKER_DIED),
    (rf"{_TOLD}Engine core proc(?:ess)? \S+ died unexpectedly", SignKind.ENGINE_GONE),
    (rf"{_TOLD}Process (?:DP)?EngineCore\S* {_WITH_CODE}", SignKind.ENGINE_GONE),
    (rf"{_TOLD}Process \S+ {_WITH_CODE}", SignKind.PROCESS_DIED),
    ("Received KeyboardInterrupt, shutting down API servers", SignKind.INTERRUPTED),
    (r"Error in .{0,80}stream\w* generator", SignKind.STREAM_FAILED),
    # a compiler, which an exception of its caller does not quote
    (r"\S+:\d+:\d+: fatal error: ", SignKind.EARLIER),
    # Triton, around vLLM
    (rf"{_GLOG}\"?Failed to (?:initialize Python stub|create instance): ", SignKind.BOOT_FAILED),
    # py-spy
    (r"Thread \d+ \((?:idle|active)\): \"MainThread\"", SignKind.STACK),
    # Intel's driver, then Ray, UCX and Open MPI
    (r"Abort was called at \d+ line in file", SignKind.NATIVE_CRASH),
    (r"\[[^\]\n]{3,80}\] logging\.cc:\d+: \*\*\* SIG", SignKind.NATIVE_CRASH),
    (
        r"\[[^\]\n]{3,80}\] +(?:Caught signal \d+ \(|\*\*\* Process received signal)",
        SignKind.NATIVE_CRASH,
    ),
    (
        (
            r"\[W\d[^\]\n]{3,60}\] (?:\[c10d\] (?:recv|send)\w+ failed on SocketImpl"
            r"|\[PG [^\]\n]{1,80}\] Failed to check the \"should dump\" flag)"
        ),
        SignKind.PEER_LOST,
    ),
    # with its text; else it is prose
    (
        r"(?:[\w.]+\.)?(?:Async|MQ)?EngineDeadError: (?=Engine|Background loop|Task finished)",
        SignKind.ENGINE_DEAD,
    ),
)
_ERROR = re.compile(
    r"(?:CUDA|HIP|XPU) out of memory\. |(?:CUDA|HIP|NCCL|cuBLAS) error: |CUBLAS_STATUS_(?!SUCCESS)"
)
_PROGRAM_ENDED = re.compile(
    r"(?:\[W.*)?.*destroy_process_group\(\) was not called before program exit"
    r"|.*resource_tracker: There appear to be|(\s*Throughput: [\d.]+|(?:.*\s)?PASS(?:ED)?(?:\W|$))"
)
"""The last lines of a program that uses vLLM. Group 1: also those of a client of a server."""
_SIGN = re.compile("|".join(f"({wording})" for wording, _ in _WORDINGS))
_ANY_SIGN = re.compile("|".join(wording for wording, _ in _WORDINGS))
"""The same without groups, which is three times as fast."""
_ACCESS = re.compile(r'\S+ - "([A-Z]+) (\S+) HTTP/[\d.]+" (\d{3})\b')
_STREAMS = re.compile(r"completions|messages|responses|generate|invocations|inference|audio")
"""Paths of requests that may be answered with a stream."""
_WITHOUT_ENGINE = re.compile(r"/(?:de)?(?:tokenize|render)\b")
"""Paths of requests that the API server answers without the engine."""
_OOM = re.compile(r"\bout of memory: Killed process (\d{1,10}) \(([^)\n]{1,64})\)", re.IGNORECASE)
_OOM_PATHS = re.compile(r"\bconstraint=\S+,(?=task=)")
"""Control groups in the kernel's report, before the name of the process."""
_FRAME = re.compile(r'File "[^"\n]+", line \d+')
_CONNECTOR = re.compile(r"kv_connector['\"]?[=:] ?['\"](\w+)['\"]")
_REQUEST = ("Received request ", "Added request ", "Processed prompts: ")
_BOOT_LINE = re.compile(
    r"Initializing an? (?:V\d )?LLM engine|init engine \(|Starting to load model |Loading weights "
    r"took|Model loading took|GPU KV cache size: |Graph capturing finished"
    r"|(?:No current|Waiting for creating a) placement group"
)
"""Lines that an engine logs as it boots, from 0.6 on."""
_REFUSED = re.compile(r"(?:vllm(?: serve)?|api_server\.py): error: ")
_STATS = re.compile(
    r"(?:Engine (\d+): |\d+ Engines Aggregated: )?Avg prompt throughput: ([\d.]+) tokens/s, "
    r"Avg generation throughput: ([\d.]+) tokens/s, (?:[A-Z][\w /]{1,30}: ?[\d.]+ ms, ){0,3}"
    r"Running: (\d+) reqs, (?:Swapped: \d+ reqs, )?(?:Waiting|Pending): (\d+) reqs"
)
# In a pasted text without a log, the reporter's prose may name a death. Only vLLM's sentences
# count, beside a traceback.
_QUOTED = re.compile(
    r"EngineCore encountered a(?:n issue| fatal error)|EngineCore failed to start"
    r"|Engine core initialization failed"
)

# The output of `collect_env`, which users paste before the log. A traceback in it is not the
# server's.
_ENVIRONMENT = ("Collecting environment information...", "System Info")
_ENVIRONMENT_ENDS = ("```", "</details>")

_OF_VLLM = re.compile(r"(?i)$|vllm|python|pt_main|ray|api_?server|engine|worker|uvicorn|mp_")
"""Names that the kernel may have for a process of a server."""
_PROSE = 20_000
"""Characters kept of a text that no server logged."""
_SURVIVED = 3
"""Answers after an open traceback that prove the engine survived it; fewer may be in flight."""
_DOUBTFUL = 10_000
"""Most lines kept that the engine's answers may refute."""
_TEXT = 300
_PREVIOUS = re.compile(r"\b(?:kubectl|oc|k) .*\blogs? .*(?:--previous\b|-p\b)")
"""A command that prints the log of the life that ended."""
_NEAR = 10
"""Most lines from a report of an end to another that has its reason."""
_REASON = re.compile(
    r"(?i)oom|memory|node.?fail|time limit|execution time|preempt|evict|reclaim|deadline"
)


class ServerLife:
    """One life of a server, read line by line: its signs, exceptions and boot facts."""

    stopping = frozenset({SignKind.STOP_ASKED, SignKind.SHUTDOWN, SignKind.ENGINE_STOP_ASKED})

    def __init__(self, earlier: ServerLife | None = None) -> None:
        """Begin a life. earlier: the life before it in the log, whose processes may still log."""
        self.finder = Finder()
        self.boot = BootReader()
        # the first sign of each kind that no later answer refuted
        self.first: dict[AnySign, Sign] = {}
        # the last line with a server's prefix
        self.last_line: Line | None = None
        # the log has a server's first lines, and the last of them
        self.booted = False
        self.booted_at: float = 0
        # the last line of an engine's boot, "" without one
        self.boot_line = ""
        # the server answered or counted requests, so it had booted
        self.served = False
        # the API server of an earlier life that was ready, which may still answer beside this one
        self._other_api: int | None = (
            (earlier.api_pid if earlier.ready else earlier._other_api) if earlier else None
        )
        # a further node of the server, which has no API server
        self.headless = False
        # the last progress bar of an offline program has prompts without an answer
        self.prompts_open: bool | None = None
        # a line shows an offline program
        self._of_program = False
        # the container that printed the last line of vLLM
        self._container = ""
        # a line has vLLM's prefix
        self.of_vllm = False
        # EngineCore or a worker logged an error
        self.engine_error = False
        self.first_engine_line: float | None = None
        # argparse's error, if the command line was refused
        self.usage: str | None = None
        # class of the KV connector; "" if there is none, None if unknown
        self.connector: str | None = None
        # its arguments and configuration as printed
        self.config = ""
        # names of the processes
        self.pids: dict[int, str] = {}
        # pid of the boot's first line
        self.api_pid: int | None = None
        # by engine: its last count has requests
        self.busy: dict[str, bool] = {}
        # by engine: number of its last counts in a row that have requests and no new token
        self.stalls: dict[str, int] = {}
        # a request is open; None if a stream may be open, whose 200 is logged at its start
        self.open: bool | None = False
        # line of the last answer that may be a stream, whose 200 is logged as it begins
        self.may_stream: float = 0
        # times since the last token that vLLM logged "No available shared memory broadcast block"
        self.waits = 0
        # the lines without a server's prefix, up to 20,000 characters
        self.prose: list[str] = []
        # they hold a sentence with which vLLM reports a death
        self.quoted = False
        # pids that logged in this life or in an earlier one
        self._known: set[int] = set() if earlier is None else earlier._known
        self._doubtful: deque[Line] = deque(maxlen=_DOUBTFUL)
        self._in_environment = False
        self._lines = self._logged = self._prose_length = 0
        self._begun: dict[str, str] = {}
        # the last line with an answer or with tokens
        self._alive: float = 0
        # lines of other programs: whether they name the server, their first line and their last
        self._of_server: bool | None = None
        self._block: float = 0
        self._last_bare: float = 0
        # the line above asks whether a container was killed
        self._asked = False
        # what the log below, which a command names as that of the life that ended, does not refute
        self._of_end: set[AnySign] = set()
        self._answers: deque[float] = deque(maxlen=_SURVIVED)

    def __contains__(self, kind: AnySign) -> bool:
        return kind in self.first

    def line_of(self, kind: AnySign) -> float | None:
        """Return the number of the first line with a sign of this kind; None without one."""
        sign = self.first.get(kind)
        return None if sign is None else sign.line

    @property
    def is_log(self) -> bool:
        """Return True if at least half of the lines have a server's prefix: a log, not prose."""
        return self._logged * 2 >= self._lines and self._logged > 0

    @property
    def is_mixed(self) -> bool:
        """Return True if some lines, but fewer than half, have a server's prefix."""
        return not self.is_log and self._logged > 0

    @property
    def ready(self) -> bool:
        """Return True if the server was ready: it logged so, answered or counted requests."""
        return self.served or SignKind.READY in self.first

    @property
    def booting(self) -> bool:
        """Return True if an engine logged lines of its boot, and not the last of them."""
        return bool(self.boot_line) and not self.boot_line.startswith("init engine (")

    def ended_by(self, line: Line) -> bool:
        """Return True if another server's log begins with this line.

        The server before was ready or had ended, or began with the same words, which a server logs
        once. A line that a collector wrote twice is no beginning. If the lines of a boot are
        missing, another EngineCore begins where the one before had died.
        """
        if SignKind.FATAL in self and line.process in self.pids.values():
            again = line.text.startswith(_FATAL) and line.pid not in (None, *self.pids)
            if again or line.text.startswith(INITIALIZES):
                return True
        if (first_words := boot_marker(line)) is None:
            return False
        # Ranks started by a launcher each log their arguments, without a pid.
        again = self._begun.get(first_words, line.raw) != line.raw and line.pid is not None
        return again or self.ready or SignKind.SHUTDOWN in self or SignKind.BOOT_FAILED in self

    @property
    def is_server(self) -> bool:
        """Return True if a server of vLLM printed lines of this log."""
        return self.booted or self.ready or self.of_vllm

    @property
    def last_error(self) -> str:
        """Return the last line's message if it is an error; else ""."""
        last = self.last_line
        return last.text.strip() if last is not None and last.level in ERRORS else ""

    @property
    def only_workers(self) -> bool:
        """Return True if only workers printed these lines, as on a node without the engine."""
        workers = ("Worker", "VllmWorker", "RayWorker")
        return bool(self.pids) and all(name.startswith(workers) for name in self.pids.values())

    @property
    def offline(self) -> bool:
        """Return True if a program used vLLM in its own process, and no API server logged."""
        served = bool({SignKind.READY, SignKind.SHUTDOWN} & self.first.keys()) or self._answers
        return self._of_program and not (
            served or any(name.startswith(API_SERVERS) for name in self.pids.values())
        )

    @property
    def survived_until(self) -> float:
        """Return the line of the server's third last answer: the engine survived all errors above.

        0 with fewer answers.
        """
        return self._answers[0] if len(self._answers) == _SURVIVED else 0

    def ready_below(self, number: float) -> bool:
        """Return True if the server was reported ready below this line."""
        return SignKind.READY in self and self.first[SignKind.READY].line > number

    def lives_below(self, number: float) -> bool:
        """Return True if the server answered or counted tokens below this line."""
        return self._alive > number

    @property
    def cut_inside(self) -> OpenTraceback | None:
        """Return the engine's traceback in which this log ends; None if the engine survived it.

        Read it before `finder.finish`, which closes the tracebacks.
        """
        for traceback in self.finder.unfinished():
            if traceback.last_line > self.survived_until and _of_engine(traceback):
                return traceback
        return None

    def feed(self, line: Line) -> None:
        """Take one line.

        A line of an unknown process counts only if the engine does not answer after it: a prompt
        may quote a log.
        """
        if self._is_doubtful(line):
            self._doubtful.append(line)
        else:
            self._take(line)

    def is_settled(self, line: Line) -> bool:
        """Return True if this line may be skipped when another line of its kind follows."""
        return not self._is_doubtful(line) and self.finder.is_idle(line)

    def skip(self, count: int) -> None:
        """Count lines of a server that were not read."""
        self._lines += count
        self._logged += count

    def finish(self) -> None:
        """Read the lines kept as possible quotes. The next life does not inherit their pids."""
        self._known = set()
        while self._doubtful:
            self._take(self._doubtful.popleft())

    def _is_doubtful(self, line: Line) -> bool:
        """Return True if the line may come from a log that a prompt quotes, not from this server.

        It has a process with a pid that never logged before, or no process and not uvicorn's form.
        False before the server is ready, and if its boot is not in this log.
        """
        if not self.ready or not self.booted or self.first_engine_line is None:
            return False
        if not line.process:
            return bool(line.source) or not line.level
        named = line.process.startswith((*ENGINE_NAMES, *API_SERVERS))
        return named and line.pid is not None and line.pid not in self._known

    def _take(self, line: Line) -> None:
        """Read one line: its sign, exception, boot facts, process and configuration."""
        text = line.text
        quoting = line.level in ("DEBUG", "INFO") and bool(
            line.source
        )  # vLLM logs tracebacks and deaths as errors
        if quoting and ("Traceback (most recent call last)" in text or _FRAME.search(text)):
            return
        self.finder.feed(line)
        self.boot.feed(line)  # the environment names the release
        if self._is_environment(line):
            return
        if ("LLM engine (" in text or "non-default args: " in text) and len(self.config) < _PROSE:
            self.config += f"{text[:_PROSE]}\n"
        if not self.connector and "kv_connector" in text and (match := _CONNECTOR.search(text)):
            self.connector = match[1]
        elif (
            self.connector is None and "non-default args: {" in text and text.rstrip().endswith("}")
        ):
            self.connector = ""
        if text.strip():
            self._lines += 1
            self._logged += bool(line.level or line.process)
            if line.level or line.process:
                self.last_line = line
        self.of_vllm |= line.of_vllm
        self._container = line.stream if line.of_vllm else self._container
        if line.pid is not None:
            self.pids[line.pid] = line.process
            self._known.add(line.pid)
        if line.of_vllm and _BOOT_LINE.match(text):
            self.boot_line = text
        if first_words := boot_marker(line):
            self.booted, self.booted_at = True, line.number
            self._begun[first_words] = line.raw
            self.api_pid = line.pid
            self.first.pop(SignKind.HEALTH_503, None)  # another server or a proxy answered before
        if line.process.startswith(ENGINE_NAMES):
            if self.first_engine_line is None and line.process.startswith(ENGINE_CORES):
                self.first_engine_line = line.number
            self.engine_error |= line.level in ("ERROR", "CRITICAL")
        if line.process == "MainProcess":
            self.headless = True
        if not line.level and not line.process:
            self._keep_prose(text)
        self._note_interrupt(line)
        if (kind := self._kind(line)) is not None and not (quoting and kind in _DEATHS):
            if kind is Meaning.UNREACHABLE or (kind is Meaning.RUNNING and " 200" in text):
                self.first.pop(Meaning.RUNNING, None)  # the last of these two counts
                self.first.pop(Meaning.UNREACHABLE, None)
            # The first line of an ordered shutdown names its trigger; without it, the shutdown
            # began before this part of the log.
            earlier = kind is SignKind.STOP_ASKED and "triggered" not in text.strip()[:_TEXT]
            number = 0 if earlier else line.number
            # with the name of the container
            words = _OOM_PATHS.sub("", line.raw) if kind in _OTHERS else text
            first = self.first.setdefault(kind, Sign(number, words.strip()[:_TEXT], line.stamp))
            near = kind in _OTHERS and number - first.line < _NEAR
            if near and _REASON.search(words) and not _REASON.search(first.text):
                self.first[kind] = replace(first, text=words.strip()[:_TEXT])

    def _note_interrupt(self, line: Line) -> None:
        """Note Ctrl-C, unless a prompt follows: it ended a command such as `kubectl logs -f`."""
        if "^C" in line.raw:
            before, _, after = line.raw.partition("^C")
            in_prefix = len(before) <= len(line.raw) - len(line.text)
            if in_prefix and not PROMPT.match(after):
                self.first.setdefault(SignKind.INTERRUPTED, Sign(line.number, "^C", line.stamp))
        pressed = self.line_of(SignKind.INTERRUPTED)
        if pressed is not None and line.number - pressed == 1 and PROMPT.match(line.text):
            del self.first[SignKind.INTERRUPTED]

    def _is_environment(self, line: Line) -> bool:
        """Return True if the line is inside the output of vLLM's `collect_env`.

        Call it once for each line: it remembers where that output begins and ends.
        """
        text = line.text.strip()
        if self._in_environment:
            self._in_environment = (
                not line.level and not line.process and not text.startswith(_ENVIRONMENT_ENDS)
            )
        elif text in _ENVIRONMENT:
            self._in_environment = True
        return self._in_environment

    def _keep_prose(self, text: str) -> None:
        """Keep a line that no server logged, up to 20,000 characters in all.

        Set `self.quoted` if it holds vLLM's words for a death.
        """
        if self._prose_length < _PROSE:
            self.prose.append(text)
            self._prose_length += len(text)
        self.quoted |= _QUOTED.search(text) is not None

    def _kind(self, line: Line) -> AnySign | None:
        """Return the sign that a line is, or None; note answers and counts of requests."""
        text = line.text if line.level or line.process else line.text.lstrip()
        if text.startswith(_FATAL) and (
            line.level or (text.rstrip() in _FATAL and not self.booted)
        ):
            return SignKind.FATAL
        if not line.level and "watchdog thread terminated with exception: " in text:
            return SignKind.NATIVE_CRASH
        if (line.pid or 0) == self._other_api != self.api_pid and (
            ' - "' in text or "Avg prompt throughput: " in text
        ):
            return None
        if ' - "' in text and (match := _ACCESS.match(text)):
            self.served = True
            return self._access(match[1], match[2], match[3], line.number)
        if _ANY_SIGN.match(text) and (match := _SIGN.match(text)):
            kind = _WORDINGS[(match.lastindex or 1) - 1][1]
            if kind is SignKind.READY:  # a long compilation is no hang
                self.waits = 0
            # the handler of a request logged it
            if kind is SignKind.ENGINE_DEAD and "serving" in line.source:
                self.open = True
            return kind
        if text.startswith(_REQUEST):
            self.open = "prompts: 100%" not in text[:30]
        if "Processed prompts:" in text and not line.level:
            self._of_program, bar = True, text.rpartition("Processed prompts:")[2]
            self.prompts_open = not bar.lstrip().startswith("100%")
        self._of_program |= line.source.startswith("llm.py:")
        if (
            not line.level
            and (match := _PROGRAM_ENDED.match(text))
            and not (match[1] and self.ready and not self._of_program)
        ):
            self._of_program |= SignKind.ENGINE_STOP_ASKED in self
            return SignKind.PROGRAM_ENDED
        of_engine = line.process.startswith(("rank", *ENGINE_NAMES)) or text.startswith("[E")
        if of_engine and not line.level and _ERROR.search(text):
            return SignKind.ERROR
        if text.startswith("No available shared memory broadcast block found"):
            self.waits += 1
        if "Avg prompt throughput: " in text and (match := _STATS.match(text)):
            self._stats(match, line.number)
        if "Killed process " in text and not line.level and (match := _OOM.search(text)):
            return self._out_of_memory(int(match[1]), match[2], "cgroup" in text)
        if "error: " in text and _REFUSED.match(text):
            self.usage = self.usage or text.strip()[:_TEXT]
        if text.rstrip() == "Shutting down" and line.level:
            return SignKind.SHUTDOWN
        if line.process == "MainProcess" and text.startswith("[shutdown] Executor: "):
            return SignKind.SHUTDOWN  # a headless rank has no API server to log it
        if line.process or (line.level and (line.of_vllm or not line.source)):
            return None
        named = text if line.stream in ("", self._container) else f"{line.stream} {text}"
        return self._report(named.strip(), line.number)

    def _report(self, text: str, number: float) -> Meaning | None:
        """Return what another program, such as a shell or the kubelet, reports of the server.

        None if the line reports nothing, if a later answer refutes it, or if the last name above it
        in its block is another program's. A block is a run of lines without a server's prefix. If
        its first name is below its reports and not the server's, their signs are removed from
        `self.first`.
        """
        if number > self._last_bare + 1 or not text or PROMPT.match(text):
            self._of_server, self._block = None, number
        self._last_bare = number
        # the answer of `docker inspect` to a template
        killed = self._asked and re.search(r"\btrue\b", text)
        text, self._asked = f"OOMKilled: {text}" if killed else text, "OOMKilled}}" in text
        if _PREVIOUS.search(text):
            self._of_end = {Meaning.KILLED, Meaning.ENDED}
        named = names_server(text)
        if named is False and self._of_server is None:  # `docker inspect` ends with the name
            self.first = {
                kind: sign
                for kind, sign in self.first.items()
                if not isinstance(kind, Meaning) or sign.line < self._block
            }
        self._of_server = self._of_server if named is None else named
        report = report_of(text)
        if report is None or self._of_server is False:
            return None
        if report.reporter == COMMAND and not self.ready:
            return None
        # a prompt over several lines may quote a report
        return None if report.meaning in _REFUTED and number < self._alive else report.meaning

    def _access(self, method: str, path: str, status: str, number: float) -> SignKind | None:
        """Note an HTTP answer in the access log; return its sign, or None.

        /health with 503 and a POST with 5xx are signs. An answer with 2xx drops those that it
        refutes.
        """
        health = path.startswith("/health")
        answer = method == "POST" and _WITHOUT_ENGINE.search(path) is None
        if status[0] == "2" and (health or answer):
            self._answers.append(number)
            self.first.pop(SignKind.HEALTH_503, None)
            self._lives_at(number)
            while self._doubtful and self._doubtful[0].number < self.survived_until:
                self._doubtful.popleft()
            if not health:
                if _STREAMS.search(path):
                    self.open, self.may_stream = None, number
                self.stalls.clear()
                self.waits = 0
        if health:
            return SignKind.HEALTH_503 if status == "503" else None
        return SignKind.SERVER_ERROR if method == "POST" and status[0] == "5" else None

    def _lives_at(self, number: float) -> None:
        """Note that the engine lives at this line; drop the signs that its answer refutes."""
        self._alive = number
        for kind in _REFUTED - self._of_end:
            self.first.pop(kind, None)

    def _out_of_memory(self, pid: int, name: str, in_container: bool) -> AnySign | None:
        """Return the sign in a kernel's report that it killed a process; None if not vLLM's.

        in_container: the report is of a cgroup.
        """
        if pid in self.pids and _OF_VLLM.match(name):  # a container's pids are also others'
            return SignKind.OOM_KILLED
        # In a container the kernel's pid is not the one that the log has.
        if in_container and name.lower().startswith("vllm"):
            return Meaning.KILLED
        return SignKind.OOM_NAMED if name.lower().startswith(("vllm", "python")) else None

    def _stats(self, match: re.Match[str], number: float) -> None:
        """Note a throughput line of vLLM: which engine has requests, and whether tokens came.

        After a sign of a shutdown it does not count.
        """
        self.served = True
        if not self.stopping.isdisjoint(self.first):
            return  # the API server keeps logging the last counts after its engine ended
        waiting = int(match[4]) + int(match[5]) > 0
        still = float(match[2]) == 0.0 and float(match[3]) == 0.0
        if float(match[3]) > 0:
            self._lives_at(number)
        engine = match[1] or ""
        if not (waiting and still):
            self.waits = 0
        self.busy[engine] = self.open = waiting
        self.stalls[engine] = self.stalls.get(engine, 0) + 1 if waiting and still else 0


def _of_engine(traceback: OpenTraceback) -> bool:
    """Return True if an engine or a worker printed the traceback, by its process or functions."""
    if traceback.process:
        return traceback.process.startswith(ENGINE_NAMES)
    return not LOOPS.isdisjoint(traceback.functions)


BEGINNINGS = ("non-default args: ", "vLLM API server version ", "Launching vLLM (")
INITIALIZES = "Initializing a V1 LLM engine"
"""The first words of EngineCore's boot."""


def boot_marker(line: Line) -> str | None:
    """Return the words with which a server begins to boot, if the line begins with them."""
    if not line.text.startswith(BEGINNINGS):
        return None
    return next(words for words in BEGINNINGS if line.text.startswith(words))
