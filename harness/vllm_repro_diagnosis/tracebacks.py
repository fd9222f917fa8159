"""Parser for Python tracebacks in a log or a pasted text.

In a real log the tracebacks of several processes are interleaved, repeated and chained, and other
records follow without a blank line. In an issue they lack the `Traceback` header or the
indentation, have several frames on one line, or consist of the last line alone. `Finder` reads all
of these in one pass. Line numbers of source files move with every release, so nothing may compare
them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from vllm_repro_diagnosis.canonical import shorten
from vllm_repro_diagnosis.log_text import Line

API_SERVERS = ("APIServer", "ApiServer")
ENGINE_CORES = ("EngineCore", "DPEngineCore")
ENGINE_NAMES = (*ENGINE_CORES, "Worker", "VllmWorker", "RayWorker")
ERRORS = ("ERROR", "CRITICAL")
_MAX_MESSAGE_LINES = 40
"""Most lines of an exception's message; further ones belong to the rest of the log."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a traceback."""

    # from the package on: `vllm/v1/worker/workspace.py`
    file: str
    function: str
    # the echoed line, or ""
    source: str = ""
    # the number of that line
    line: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """One exception as a log printed it: class, message, frames, process and chain."""

    # class as printed, perhaps qualified (`torch.OutOfMemoryError`); compare on `bare_name()`
    exception: str
    # lines joined by newlines, or ""
    message: str
    # outermost first; () for a lone last line
    frames: tuple[Frame, ...] = ()
    process: str = ""
    level: str = ""
    # the line before it in the same record (`WorkerProc hit an exception.`), or ""
    headline: str = ""
    first_line: float = 0
    # the exception before it in a chain
    cause: Raised | None = None
    # it was "the direct cause"
    explicit: bool = False
    # printed by C++ code, a kernel of the GPU or the allocator, which ends the process
    native: bool = False
    # the logging call of its first line: `core.py:1138`
    source: str = ""
    # the time of its first line
    time: str = ""

    @property
    def links(self) -> tuple[Raised, ...]:
        """Return the whole chain, oldest first."""
        chain: list[Raised] = []
        link: Raised | None = self
        while link is not None:
            chain.append(link)
            link = link.cause
        return tuple(reversed(chain))

    @property
    def functions(self) -> tuple[str, ...]:
        """Return the names of the functions in its own frames, outermost first."""
        return tuple(frame.function for frame in self.frames)

    @property
    def of_dead_engine(self) -> bool:
        """Return True for `EngineDeadError` and the same class of V0's engines."""
        return bare_name(self.exception) in (
            "EngineDeadError",
            "AsyncEngineDeadError",
            "MQEngineDeadError",
        )

    @property
    def reports_dead_engine(self) -> bool:
        """Return True if it only reports a dead engine to the API server or to a client."""
        if self.of_dead_engine and self.frames:
            return True
        return "EngineCore encountered an issue. See stack trace" in self.message

    @property
    def of_side_thread(self) -> bool:
        """Return True if the program went on: a thread without vLLM or a destructor raised it."""
        files = (frame.file for frame in self.frames)
        thread = self.headline.startswith("Exception in thread ")
        in_vllm = any("vllm" in file for file in files)
        return (thread and not in_vllm) or self.headline.startswith("Exception ignored in")

    @property
    def of_other_program(self) -> bool:
        """Return True if a client or `collect_env` printed it, as pasted beside a server's log."""
        files = [frame.file for frame in self.frames]
        if any(file.endswith("collect_env.py") for file in files):
            return True
        return not any("vllm" in file for file in files) and any(
            file.startswith(_CLIENTS) for file in files
        )


def is_core(process: str, source: str) -> bool:
    """Return True if EngineCore made the logging call `source` (`core.py:1138`).

    A line without a process counts, as of releases to 0.9; so does V0's `engine.py`, to 0.10.
    """
    core = source.rpartition("/")[2].startswith(("core.py:", "engine.py:"))
    return core and (not process or process.startswith(ENGINE_CORES))


def bare_name(exception: str) -> str:
    """Return the class without its module: `AssertionError`, `OutOfMemoryError`."""
    return exception.rpartition(".")[2]


_CLIENTS = ("openai/", "requests/", "aiohttp/", "httpx/")
_THROWN = re.compile(r"terminate called after throwing an instance of '([\w:]+)'")
_WHAT = re.compile(r"^\s*what\(\):\s+(.*)")
_NATIVE = tuple(
    (name, re.compile(wordings))
    for name, wordings in (
        (
            "c10::DistBackendError",
            (
                r"watchdog thread terminated with exception: (.*)"
                r"|Watchdog caught (collective operation timeout.*)"
                r"|ProcessGroupNCCL's (watchdog got stuck for \d+ seconds)"
            ),
        ),
        (
            "CUDA error",
            (
                r"^Failed: ([Cc]uda error .*)|^((?i:cuda|hip)(?: runtime| driver)? error[ :(].*)"
                r"|^(\S+\.(?:cuh?|hip):\d+: .*: block: .* [Aa]ssertion .* failed.*)"
                r"|^(?:\S+ )?(GPUassert: .*)|^(?:\S+ )?(Check failed: .*CUDA.*)"
            ),
        ),
        ("NCCL error", r"(NCCL WARN (?:Cuda failure|HIP failure|.*[Ee]rror|.*[Aa]bort).*)"),
        (
            "NPU error",
            (
                r"^(?:\[W[^\]]+\] Warning: )?(E[A-Z]\d{4}: (?:Inner Error|\[PID).*)"
                r"|^\[ERROR\] \S+ \(PID:\d+, Device:.*?\) (ERR\d{5} .*)"
            ),
        ),
        (
            "GPU fault",
            (
                r"^(Memory access fault by GPU .*)"
                r"|^(.*aborting with error ?: HSA_STATUS_ERROR\w*.*)"
                r"|^(HW Exception by GPU .*)"
            ),
        ),
        (
            "abort",
            (
                r"^((?:free|malloc|realloc|munmap_chunk)\(\): .*)|^(double free or corruption.*)"
                r"|^(corrupted size vs.*)|^(\*\*\* stack smashing detected.*)|^(LLVM ERROR: .*)"
                r"|^(F\d{4}(?:\d{4})? [\d:.]+ +\d+ (?![\w./-]+\.py:)[\w./+-]+:\d+\] .*)"
                r"|^(pure virtual method called)"
                r"|^(terminate called (?:without|recursively).*)"
                r"|^(\S+: \S+:\d+: .*: Assertion [`'].*' failed\..*)"
            ),
        ),
    )
)
"""Name to report, and the wordings of errors that no Python traceback shows."""
_NATIVE_WORDS = re.compile(
    r"atchdog|[Ff]ailed|[Ee]rror|ERROR|fault by GPU|NCCL WARN|\(\): |corrupt|smashing|called|assert"
    r"|: \[PID|^F\d{4}"
)
_MOST_NATIVE = 16
"""Most native errors kept: each thread of a failing kernel prints its own."""
_HEADER = re.compile(r"Traceback \(most recent call last\):?")
_TORCHSCRIPT = re.compile(r"Traceback of TorchScript\b")
_PYTEST_FRAME = re.compile(r"\s*(\S+\.py):(\d+): in (<\w+>|\w+)\s*")
# IPython prints the class before its header, and frames in several forms, with the code around them
_NOTEBOOK_HEADER = re.compile(r"\w\S*\s{2,}Traceback \(")
_NOTEBOOK_FRAME = re.compile(
    r"(?:File )?\[?(?P<file>[^\s\]()\"']{1,300}\.py|<ipython-input[^>\s]*>|\w+ In ?\[\d+\])\]?"
    r"(?:\(http\S+\))?(?::(?P<line>\d+),?|, line (?P<cell>\d+))?"
    r"(?:,? in (?:<cell line: \d+>|(?:\w+\.)*(?P<name><\w+>|\w+))(?:\(.*)?)?"
)
_NOTEBOOK_CODE = re.compile(r"\s*(-+> ?)?\d+(?:\s(?P<code>.*))?")
_FRAME = re.compile(r'File "([^"\n]{1,1000})", line (\d{1,9})\d*(?:\s*, in (<\w+>|[\w.<>]+))?')
_CARETS = re.compile(r"[\^~]+(?: <--- HERE)?")
_REPEATED = re.compile(r"\[Previous line repeated \d+ more times?\]")
_JAVA = r"(?!(?:javax?|org|com|ai|io)\.\w+\.)"
"""Not the package of an exception of Java, as a server around vLLM prints it."""
_DOTTED = _JAVA + r"(?:[A-Za-z_]\w*\.)*"
_KNOWN_CLASS = (
    _DOTTED
    + r"(?:[A-Z]\w*)?(?:Error|Exception|Interrupt|Exit|Fault|Timeout|Timedout|Failure|Failed|Died"
    + r"|Cancelled|Iteration|ExceptionGroup)"
)
# Anywhere in a text only names like `…Error` count as exceptions; at the end of a traceback any
# class name does. Python prints a class with its module, unless the class is built in, and then it
# is capitalised: a lone lower-case word before a colon (`nanobind: leaked 4 instances!`) is no
# exception.
_LIKELY = re.compile(rf"({_KNOWN_CLASS})(?:: ?(.*)|$)", re.DOTALL)
_ANY = re.compile(_JAVA + r"((?:(?:[A-Za-z_]\w*\.)+[A-Za-z_]|[A-Z])\w*)(?:: ?(.*)|$)", re.DOTALL)
_ON_ONE_LINE = re.compile(
    rf"(?<!\S)(?<!raise )(?<!except )({_KNOWN_CLASS})(?:: +(?=\S)(.*)|\s*$)", re.DOTALL
)
# The loggers of an engine print only what was raised there.
_QUALIFIED = re.compile(r"((?:[A-Za-z_]\w*\.)+[A-Z]\w*): (.+)", re.DOTALL)
UNCAUGHT = "Uncaught exception"
"""Words of RunPod for an exception that ends a program, and the headline that it gets."""
_UNCAUGHT = re.compile(
    r"(?:^|\])Uncaught exception \| <class '([\w.]+)'>; (.*?)(?:; <traceback object.*)?$"
)
_EXPLICIT = "The above exception was the direct cause of the following exception:"
_IMPLICIT = "During handling of the above exception, another exception occurred:"
_GROUP_MARGIN = re.compile(r"\s*[|+](?:-[-+]*(?: \d+ -+)?|[ |+]*\|)? ?")
_RECORD = re.compile(
    r"(?:EngineCore (?:encountered a fatal error|failed to start)\."
    r"|WorkerProc (?:hit an exception|failed(?: to start)?)\."
    r"|Error getting async model runner output|AsyncLLM output_handler failed\."
    r"|Error in .{0,80}generator\.?"
    r"|Exception in ASGI application|Process [\w.-]+:|Invocation of .{0,80} method failed)\s*$"
)


@dataclass(slots=True, kw_only=True)
class _Block:
    """A traceback that is being read, so that more lines of it may come."""

    # the first line
    line: Line
    headline: str
    # of the `Traceback` line; None without it
    header_indent: int | None = None
    frames: list[Frame] = field(default_factory=list)
    frame_indent: int = 0
    # a notebook printed it
    notebook: bool = False
    # a line inside is blank or ends a block of code, so prose may follow
    torn: bool = False
    exception: str | None = None
    message: list[str] = field(default_factory=list)
    # the exception of TorchScript's wrapper, if the one that it wraps does not follow
    wrapper: tuple[str, list[str]] | None = None
    # the message is complete, and only a chain marker can follow
    done: bool = False
    # the chain marker that followed
    chained: str = ""
    cause: Raised | None = None
    explicit: bool = False

    def take(self, exception: str, message: str | None) -> None:
        """Note the exception in the traceback's last line: class and first line of its message.

        message: None if no colon follows the class; then the message is complete.
        """
        self.exception, self.message, self.done = exception, [message or ""], message is None

    def close(self) -> Raised | None:
        """Return the exception that was read.

        If the last line of the traceback is missing, return TorchScript's wrapper of it, else the
        exception before it in the chain, else None.
        """
        exception, message = self.exception, self.message
        if exception is None and self.wrapper is not None:
            exception, message = self.wrapper
        if exception is None:
            return self.cause  # the one in front of a traceback that is cut
        return Raised(
            exception=exception,
            message="\n".join(message).strip(),
            frames=tuple(self.frames),
            process=self.line.process,
            level=self.line.level,
            headline=self.headline,
            first_line=self.line.number,
            source=self.line.source,
            time=self.line.stamp,
            cause=self.cause,
            explicit=self.explicit,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenTraceback:
    """A traceback that a process had not finished in its last lines."""

    process: str
    last_line: float
    functions: tuple[str, ...]
    headline: str


@dataclass(slots=True)
class _Transcript:
    """State of reading the lines that one process prints by one logging call, or without a logger.

    Each has its own state, so that the lines of a traceback stay together.
    """

    # the last line
    line: Line
    block: _Block | None = None
    # the last text that is no underline
    previous: str = ""

    @property
    def unfinished(self) -> OpenTraceback | None:
        """Return the open traceback whose exception has not come yet, or None.

        A lone headline such as "EngineCore failed to start." counts as its beginning.
        """
        headline = self.previous
        if self.block is not None and self.block.exception is None and not self.block.wrapper:
            functions = tuple(frame.function for frame in self.block.frames)
            headline = self.block.headline
        elif self.block is None and _RECORD.match(self.previous):  # the log ends after its headline
            functions = ()
        else:
            return None
        return OpenTraceback(
            process=self.line.process,
            last_line=self.line.number,
            functions=functions,
            headline=headline,
        )


class Finder:
    """Collector of the exceptions in a log, which takes the log line by line."""

    def __init__(self) -> None:
        self._transcripts: dict[tuple[int | str, str], _Transcript] = {}
        self._last_transcript: dict[int | str, tuple[int | str, str]] = {}
        self._raised: list[Raised] = []
        self._thrown = ""
        self._natives = 0
        # line of the last traceback whose frames are not readable
        self.unread: float = 0

    def feed(self, line: Line) -> None:
        """Take one line, which may begin, continue or end a traceback of its process."""
        bare = not line.source or line.has_other_format
        if self._thrown or (bare and _NATIVE_WORDS.search(line.text)):
            self._read_native(line)
        key = _key(line)
        # uvicorn prints its record's first line with a level and the traceback without one
        if key[1] == line.level and line.level and _RECORD.match(line.text):
            key = (line.speaker, "")
        transcript = self._transcripts.setdefault(key, _Transcript(line))
        transcript.line = line
        interrupted = self._last_transcript.get(line.speaker, key) != key
        self._last_transcript[line.speaker] = key
        self._read(transcript, line, interrupted)

    def is_idle(self, line: Line) -> bool:
        """Return True if this line's process and logging call have no open traceback.

        False before the first line of that call: nothing of it was closed yet.
        """
        transcript = self._transcripts.get(_key(line))
        return transcript is not None and transcript.block is None

    def finish(self) -> tuple[Raised, ...]:
        """Return all exceptions of the server, in the order of their first lines.

        It ends the open tracebacks: call `unfinished` before it.
        """
        for transcript in self._transcripts.values():
            self._close(transcript)
        of_server = (raised for raised in self._raised if not raised.of_other_program)
        return tuple(sorted(of_server, key=lambda raised: raised.first_line))

    def _read_native(self, line: Line) -> None:
        """Keep the error of C++ code, a GPU or the allocator that a line reports, if it does.

        It has no Python traceback. Class and message of an uncaught C++ exception are on two lines.
        At most 16 errors are kept.
        """
        if match := _THROWN.search(line.text):
            self._thrown = match[1]
            return
        rows = ((self._thrown, _WHAT), *_NATIVE) if self._thrown else _NATIVE
        for name, wordings in rows:
            if (match := wordings.search(line.text)) and self._natives < _MOST_NATIVE:
                self._natives += 1
                raised = Raised(
                    exception=name,
                    message=match[match.lastindex or 0].strip(),
                    process=line.process,
                    first_line=line.number,
                    native=True,
                    time=line.stamp,
                )
                self._raised.append(raised)
                return

    def unfinished(self) -> tuple[OpenTraceback, ...]:
        """Return the tracebacks that processes had not finished in their last lines."""
        last = (self._transcripts[key] for key in self._last_transcript.values())
        return tuple(open_ for transcript in last if (open_ := transcript.unfinished) is not None)

    def _close(self, transcript: _Transcript) -> None:
        """End the open traceback, if there is one, and keep its exception if that was read.

        If it has a `Traceback` line but no frame that could be read, note the number of its first
        line in `self.unread`. transcript: the state of one process and logging call.
        """
        block, transcript.block = transcript.block, None
        if block is None:
            return
        if block.header_indent is not None and not block.frames:
            self.unread = max(self.unread, block.line.number)
        if (raised := block.close()) is not None:
            self._raised.append(raised)

    def _read(self, transcript: _Transcript, line: Line, interrupted: bool) -> None:
        """Read one line: header, frame, chain marker, message or other text.

        transcript: the state of the line's process and logging call. interrupted: another logging
        call of that process printed the line before.
        """
        text = line.text.rstrip()
        if text[:12].strip()[:1] in ("|", "+"):
            text = _GROUP_MARGIN.sub("", text, count=1)
        if ".py:" in text and (match := _PYTEST_FRAME.fullmatch(text)):
            text = f'  File "{match[1]}", line {match[2]}, in {match[3]}'
        block = transcript.block
        if block is not None and block.notebook and block.exception is None:
            text = _from_notebook(text)
        stripped = text.strip()
        if block is not None and block.exception is not None and not block.done:
            block.done = interrupted or not stripped or len(block.message) >= _MAX_MESSAGE_LINES
        if "Traceback (" in text and (match := _HEADER.search(text)):
            block = self._begin(transcript, line, indent=_indent(text))
            block.notebook = _NOTEBOOK_HEADER.match(text) is not None
            _take_frames(block, text[match.end() :])
        elif "TorchScript" in text and block is not None and _TORCHSCRIPT.match(stripped):
            if block.exception is not None:
                block.wrapper, block.exception, block.done = (
                    (block.exception, block.message),
                    None,
                    False,
                )
            block.header_indent = _indent(text)
        elif stripped in (_EXPLICIT, _IMPLICIT):
            if block is not None and block.exception is not None:
                block.done, block.chained = True, stripped
        elif 'File "' in text and _FRAME.search(text):
            if block is None or block.exception is not None:
                block = self._begin(transcript, line, indent=None)
            _take_frames(block, text)
        elif block is None or block.done or (not stripped and block.exception is not None):
            self._read_outside(transcript, line, stripped)
        elif block.exception is not None:
            self._message_of(transcript, block, text)
        elif stripped and not stripped.startswith("```"):
            self._inside(transcript, block, text)
        else:
            block.torn = True
        if stripped and not (stripped[0] in "^~" and _CARETS.fullmatch(stripped)):
            transcript.previous = stripped

    def _begin(self, transcript: _Transcript, line: Line, *, indent: int | None) -> _Block:
        """Begin and return a traceback: the next link after a chain marker, else a new one.

        A new one ends the traceback before it. indent: of its header; None without a header.
        """
        before = transcript.block
        cause, explicit = None, False
        if before is not None and before.chained:
            cause, explicit, headline = before.close(), before.chained == _EXPLICIT, before.headline
        else:
            fresh = before is None or before.exception is None or _RECORD.match(transcript.previous)
            headline = transcript.previous if fresh else ""
            self._close(transcript)
        transcript.block = _Block(
            line=line, headline=headline, header_indent=indent, cause=cause, explicit=explicit
        )
        return transcript.block

    def _inside(self, transcript: _Transcript, block: _Block, text: str) -> None:
        """Read a line below a header or frame: source, its underline, exception, or prose.

        Prose after frames without a header drops the traceback.
        """
        stripped = text.strip()
        if _CARETS.fullmatch(stripped) or _REPEATED.fullmatch(stripped):
            return
        indent = _indent(text)
        echoed = not block.frames or bool(block.frames[-1].source)
        deeper = indent > block.frame_indent
        at_header = (
            block.header_indent is not None
            and indent <= block.header_indent
            and indent < max(block.frame_indent, 1)
        )
        # without indentation, the line below a frame is its source
        flat = block.frame_indent == 0 and not echoed
        wording = _ANY if at_header and block.frames and not (block.torn or flat) else _LIKELY
        bold = stripped.strip("*`_") if stripped[0] in "*`_" else stripped
        raised = wording.fullmatch(bold) if at_header or not deeper or echoed else None
        if raised is not None and (block.frames or block.header_indent is not None):
            block.take(raised[1], raised[2])
        elif not echoed:
            block.frames[-1] = replace(block.frames[-1], source=stripped)
        elif block.header_indent is None and transcript.previous != stripped and indent == 0:
            # Prose after frames without an exception: the pasted traceback ends here.
            transcript.block = None

    def _message_of(self, transcript: _Transcript, block: _Block, text: str) -> None:
        """Read a line after an exception: more of its message, or the end of the traceback."""
        line, stripped = transcript.line, text.strip()
        fenced = stripped.startswith("```")  # the end of a block of code in an issue
        record = line.has_other_format or (line.level and line.level != block.line.level)
        if fenced or _RECORD.match(stripped) or record:
            block.done = True
        elif not block.frames and _LIKELY.fullmatch(stripped):
            self._read_outside(transcript, line, stripped)
        else:
            block.message.append(text if block.line.level else stripped)

    def _read_outside(self, transcript: _Transcript, line: Line, stripped: str) -> None:
        """End the open traceback; begin one if the line alone names an exception.

        An empty line ends none, nor does a line after "During handling of the above exception".
        """
        if transcript.block is not None and (not stripped or transcript.block.chained):
            return
        self._close(transcript)
        if UNCAUGHT in stripped and (uncaught := _UNCAUGHT.search(stripped)):
            transcript.block = _Block(line=line, headline=UNCAUGHT)
            transcript.block.take(uncaught[1], uncaught[2])
            return
        by_engine = line.level in ERRORS and (
            line.process.startswith(ENGINE_NAMES) or is_core(line.process, line.source)
        )
        bare = not line.source or line.has_other_format or by_engine
        alone = _LIKELY.fullmatch(stripped) if stripped and bare else None
        alone = alone or (_QUALIFIED.fullmatch(line.text) if by_engine else None)
        if alone is not None and (alone[2] or by_engine):
            headline, message = transcript.previous, [alone[2] or ""]
            transcript.block = _Block(
                line=line, headline=headline, exception=alone[1], message=message
            )


def _from_notebook(text: str) -> str:
    """Return a line of a notebook's traceback as Python prints it; "" for code around a frame."""
    if match := _NOTEBOOK_FRAME.fullmatch(text.strip()):
        file, line, cell, name = match.group("file", "line", "cell", "name")
        return f'  File "{file}", line {line or cell or 0}, in {name or "<module>"}'
    if match := _NOTEBOOK_CODE.fullmatch(text):
        return f"    {match['code']}" if match[1] else ""
    return text


def _take_frames(block: _Block, text: str) -> None:
    """Add the frames on a line to a traceback, and the exception if it follows on the line.

    A web page may have joined them.
    """
    matches = list(_FRAME.finditer(text))
    for at, match in enumerate(matches):
        end = matches[at + 1].start() if at + 1 < len(matches) else len(text)
        after = text[match.end() : end].strip(" ,:")
        raised = _ON_ONE_LINE.search(after) if at + 1 == len(matches) and after else None
        source = (after[: raised.start()] if raised else after).strip()
        block.frames.append(Frame(shorten(match[1]), match[3] or "<module>", source, int(match[2])))
        if raised:
            block.exception, block.message = raised[1], [(raised[2] or "").strip()]
    if matches:
        block.frame_indent = _indent(text)


def _key(line: Line) -> tuple[int | str, str]:
    """Return (process, logging call): lines with the same key may belong to one traceback.

    Without a logging call the level is in its place, else "".
    """
    return (line.speaker, "" if line.has_other_format else line.source or line.level)


def _indent(text: str) -> int:
    """Return the number of blanks at the beginning of a line."""
    return len(text) - len(text.lstrip())
