"""Python tracebacks, out of the lines of a log or out of whatever was pasted.

In a real log the tracebacks of several processes come interleaved, twice, chained, and in records that other
records follow without a blank line. In an issue they come without the `Traceback` header, without
indentation, with several frames on one line, or as the last line alone. `Finder` reads all of these in one
pass. Line numbers of source files are dropped on purpose: they move with every release, and nothing that is
compared may depend on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from vllm_repro.diagnosis.log_text import Line, read_lines

__all__ = ["Finder", "Frame", "Raised", "Unfinished", "bare_name", "find_raised", "shorten"]

_MAX_MESSAGE_LINES = 40
"""How far an exception's message may run on; beyond that it is the rest of the log that is being read."""


@dataclass(frozen=True, slots=True)
class Frame:
    """`file` from the package on (`vllm/v1/worker/workspace.py`), without the line number; `source` is the
    echoed line or "".
    """

    file: str
    function: str
    source: str = ""


@dataclass(frozen=True, slots=True)
class Raised:
    """One exception as it was printed.

    exception: class as printed, perhaps qualified (`torch.OutOfMemoryError`); compare on `bare_name()`.
    message: lines joined by newlines, "" where there is none. frames: outermost first, () for a lone last
        line.
    headline: what was said right before it in the same record (`WorkerProc hit an exception.`), "" where
        nothing was.
    cause: the exception printed before it in a chain; `explicit` says that it was "the direct cause".
    """

    exception: str
    message: str
    frames: tuple[Frame, ...]
    process: str = ""
    pid: int | None = None
    level: str = ""
    headline: str = ""
    first_line: int = 0
    last_line: int = 0
    cause: Raised | None = None
    explicit: bool = False

    @property
    def links(self) -> tuple[Raised, ...]:
        """The whole chain, oldest first, this one last."""
        chain: list[Raised] = []
        link: Raised | None = self
        while link is not None:
            chain.append(link)
            link = link.cause
        return tuple(reversed(chain))

    @property
    def functions(self) -> tuple[str, ...]:
        return tuple(frame.function for frame in self.frames)

    @property
    def messenger(self) -> bool:
        """Whether it only tells that an engine is dead, to the API server or, with the answer, to a client."""
        if bare_name(self.exception) == "EngineDeadError" and self.frames:
            return True
        return "EngineCore encountered an issue. See stack trace" in self.message

    @property
    def same_as(self) -> tuple[str, str, tuple[str, ...]]:
        """Equal for two prints of one death: the ranks of a group, a worker's block printed twice,
        EngineCore's re-raise.
        """
        return bare_name(self.exception), self.message, self.functions


def bare_name(exception: str) -> str:
    """The class without its module: `AssertionError`, `OutOfMemoryError`."""
    return exception.rpartition(".")[2]


_PACKAGES = frozenset(
    {
        "asyncio",
        "concurrent",
        "fastapi",
        "flashinfer",
        "multiprocessing",
        "ray",
        "starlette",
        "torch",
        "transformers",
        "triton",
        "uvicorn",
        "uvloop",
        "vllm_repro_lab",
        "xgrammar",
    }
)


def shorten(path: str) -> str:
    """A source file's path from its package on, so that it is the same on every machine and tells nothing
    about one.
    """
    path = path.replace("\\", "/")
    for root in ("/site-packages/", "/dist-packages/"):
        if root in path:
            return path.rpartition(root)[2]
    parts = [part for part in path.split("/") if part not in ("", ".", "..", "...")]
    for at in range(len(parts) - 2, -1, -1):
        if parts[at] == "vllm":
            return "/".join(parts[at:])
    for at, part in enumerate(parts[:-1]):
        if part in _PACKAGES:
            return "/".join(parts[at:])
        if re.fullmatch(r"python\d\.\d+", part):
            return "/".join(parts[at + 1 :])
    absolute = path.startswith(("/", "~")) or re.match(r"[A-Za-z]:/", path)
    return parts[-1] if absolute and parts else "/".join(parts)


_HEADER = re.compile(r"Traceback \(most recent call last\):?")
_FRAME = re.compile(r'File "([^"\n]{1,1000})", line \d+(?:, in (<\w+>|[\w.<>]+))?')
_CARETS = re.compile(r"[\^~]+")
_REPEATED = re.compile(r"\[Previous line repeated \d+ more times?\]")
_DOTTED = r"(?:[A-Za-z_]\w*\.)*"
_KNOWN_CLASS = (
    _DOTTED
    + r"(?:[A-Z]\w*)?(?:Error|Exception|Interrupt|Exit|Fault|Timeout|Timedout|Failure|Failed|Died|Cancelled"
    + r"|Iteration|ExceptionGroup)"
)
# Anywhere: only names that say themselves that they are exceptions. Where a traceback demands one: any class name.
# Python prints a class with its module, unless it is one of its own, and those are capitalised: a lone small word
# before a colon (`nanobind: leaked 4 instances!`) is no exception.
_LIKELY = re.compile(rf"({_KNOWN_CLASS})(?:: ?(.*)|$)", re.DOTALL)
_ANY = re.compile(r"((?:(?:[A-Za-z_]\w*\.)+[A-Za-z_]|[A-Z])\w*)(?:: ?(.*)|$)", re.DOTALL)
_ON_ONE_LINE = re.compile(rf"(?<!\S)(?<!raise )(?<!except )({_KNOWN_CLASS})(?:: +(?=\S)(.*)|\s*$)", re.DOTALL)
_EXPLICIT = "The above exception was the direct cause of the following exception:"
_IMPLICIT = "During handling of the above exception, another exception occurred:"
_GROUP_MARGIN = re.compile(r"\s*[|+](?:-[-+]*(?: \d+ -+)?|[ |+]*\|)? ?")
_RECORD = re.compile(
    r"(?:EngineCore (?:encountered a fatal error|failed to start)\."
    r"|WorkerProc (?:hit an exception|failed(?: to start)?)\."
    r"|Error getting async model runner output|AsyncLLM output_handler failed\.|Error in .{0,80}generator\.?"
    r"|Exception in ASGI application|Process [\w.-]+:|Invocation of .{0,80} method failed)\s*$"
)


@dataclass(slots=True)
class _Block:
    """A traceback that is being read."""

    process: str
    pid: int | None
    level: str
    headline: str
    first_line: int
    last_line: int
    header_indent: int | None
    frames: list[Frame] = field(default_factory=list)
    frame_indent: int = 0
    exception: str | None = None
    message: list[str] = field(default_factory=list)
    done: bool = False
    """The message is complete; only a chain marker can still follow."""
    chained: str = ""
    """The chain marker that was read after it."""
    cause: Raised | None = None
    explicit: bool = False

    def close(self) -> Raised | None:
        if self.exception is None:
            return None
        return Raised(
            self.exception,
            "\n".join(self.message).strip(),
            tuple(self.frames),
            self.process,
            self.pid,
            self.level,
            self.headline,
            self.first_line,
            self.last_line,
            self.cause,
            self.explicit,
        )


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A traceback of which the end is missing: who began to print it, where, and through which functions it went."""

    process: str
    last_line: int
    functions: tuple[str, ...]


@dataclass(slots=True)
class _Voice:
    """What one process printed through one logging call (or raw): the place where the lines of one traceback
    belong together.
    """

    block: _Block | None = None
    previous: str = ""
    process: str = ""
    last_line: int = 0

    @property
    def unfinished(self) -> Unfinished | None:
        if self.block is not None and self.block.exception is None:
            functions = tuple(frame.function for frame in self.block.frames)
            return Unfinished(self.process, self.last_line, functions)
        if self.block is None and _RECORD.match(self.previous):  # its headline is the last that is here
            return Unfinished(self.process, self.last_line, ())
        return None


class Finder:
    """Feeds on lines, keeps the tracebacks found. Linear in the log; remembers only what was raised."""

    def __init__(self) -> None:
        self._voices: dict[tuple[int | str, str], _Voice] = {}
        self._last_voice: dict[int | str, tuple[int | str, str]] = {}
        self._found: list[Raised] = []

    def feed(self, line: Line) -> None:
        key = (line.speaker, line.source or ("" if not line.level else line.level))
        # uvicorn prints its record's first line with a level and the traceback without one
        if key[1] == line.level and line.level and _RECORD.match(line.text):
            key = (line.speaker, "")
        voice = self._voices.get(key)
        if voice is None:
            voice = self._voices[key] = _Voice()
        voice.process, voice.last_line = line.process, line.number
        interrupted = self._last_voice.get(line.speaker, key) != key
        self._last_voice[line.speaker] = key
        self._read(voice, line, interrupted)

    def finish(self) -> tuple[Raised, ...]:
        """Everything raised, in the order in which it began to be printed; call `unfinished` before it."""
        for voice in self._voices.values():
            self._close(voice)
        return tuple(sorted(self._found, key=lambda raised: raised.first_line))

    def unfinished(self) -> tuple[Unfinished, ...]:
        """The tracebacks that processes had not printed to their ends when they were last heard."""
        last = (self._voices[key] for key in self._last_voice.values())
        return tuple(open_ for voice in last if (open_ := voice.unfinished) is not None)

    def _close(self, voice: _Voice) -> Raised | None:
        raised = voice.block.close() if voice.block is not None else None
        voice.block = None
        if raised is not None:
            self._found.append(raised)
        return raised

    def _read(self, voice: _Voice, line: Line, interrupted: bool) -> None:
        text = line.text.rstrip()
        if text[:12].strip()[:1] in ("|", "+"):
            text = _GROUP_MARGIN.sub("", text, count=1)
        stripped = text.strip()
        block = voice.block
        if block is not None and block.exception is not None and not block.done:
            block.done = interrupted or not stripped or len(block.message) >= _MAX_MESSAGE_LINES
        if found := _HEADER.search(text):
            self._begin(voice, line, indent=len(text) - len(text.lstrip()))
            self._frames_of(voice, line, text[found.end() :])
        elif stripped in (_EXPLICIT, _IMPLICIT):
            if block is not None and block.exception is not None:
                block.done, block.chained = True, stripped
        elif 'File "' in text and _FRAME.search(text):
            if block is None or block.exception is not None:
                self._begin(voice, line, indent=None)
            self._frames_of(voice, line, text)
        elif block is None or block.done or (not stripped and block.exception is not None):
            self._loose(voice, line, stripped)
        elif block.exception is not None:
            self._message_of(voice, line, text, stripped)
        elif stripped:
            self._inside(voice, block, line, text, stripped)
        if stripped and not _CARETS.fullmatch(stripped):
            voice.previous = stripped

    def _begin(self, voice: _Voice, line: Line, *, indent: int | None) -> None:
        before = voice.block
        cause: Raised | None = None
        headline = voice.previous if before is None or before.exception is None or before.chained else ""
        if before is not None and before.exception is not None and not before.chained and _RECORD.match(voice.previous):
            headline = voice.previous
        explicit = False
        if before is not None and before.chained:
            cause, explicit, headline = before.close(), before.chained == _EXPLICIT, before.headline
            voice.block = None
        else:
            self._close(voice)
        voice.block = _Block(
            line.process,
            line.pid,
            line.level,
            headline,
            line.number,
            line.number,
            indent,
            cause=cause,
            explicit=explicit,
        )

    def _frames_of(self, voice: _Voice, line: Line, text: str) -> None:
        """Reads the frames on one line: one in a real traceback, several (and the exception) where a web page
        lost its newlines.
        """
        block = voice.block
        assert block is not None
        found = list(_FRAME.finditer(text))
        for at, match in enumerate(found):
            end = found[at + 1].start() if at + 1 < len(found) else len(text)
            rest = text[match.end() : end].strip(" ,:")
            raised = _ON_ONE_LINE.search(rest) if at + 1 == len(found) and rest else None
            source = (rest[: raised.start()] if raised else rest).strip()
            block.frames.append(Frame(shorten(match[1]), match[2] or "<module>", source))
            if raised:
                block.exception, block.message = raised[1], [(raised[2] or "").strip()]
        if found:
            block.frame_indent = len(text) - len(text.lstrip())
            block.last_line = line.number

    def _inside(self, voice: _Voice, block: _Block, line: Line, text: str, stripped: str) -> None:
        """A line of an open traceback that is no frame: the echo of the source, its underline, or the
        exception.
        """
        if _CARETS.fullmatch(stripped) or _REPEATED.fullmatch(stripped):
            return
        indent = len(text) - len(text.lstrip())
        echoed = not block.frames or bool(block.frames[-1].source)
        deeper = indent > block.frame_indent
        at_header = (
            block.header_indent is not None and indent <= block.header_indent and indent < max(block.frame_indent, 1)
        )
        raised = (_ANY if at_header else _LIKELY).fullmatch(stripped) if at_header or not deeper or echoed else None
        if raised is not None and (block.frames or block.header_indent is not None):
            block.exception, block.message, block.last_line = raised[1], [raised[2] or ""], line.number
        elif not echoed:
            block.frames[-1] = replace(block.frames[-1], source=stripped)
        elif block.header_indent is None and voice.previous != stripped and indent == 0 and not deeper:
            # Prose after frames that came without their exception: what was pasted ends here.
            voice.block = None

    def _message_of(self, voice: _Voice, line: Line, text: str, stripped: str) -> None:
        block = voice.block
        assert block is not None
        if _RECORD.match(stripped) or (line.level and line.level != block.level):
            block.done = True
        elif not block.frames and _LIKELY.fullmatch(stripped):
            self._loose(voice, line, stripped)
        else:
            block.message.append(text if block.level else stripped)
            block.last_line = line.number

    def _loose(self, voice: _Voice, line: Line, stripped: str) -> None:
        """Outside of a traceback: the last line of one, pasted alone, still names an exception."""
        if voice.block is not None and (not stripped or voice.block.chained):
            return
        self._close(voice)
        alone = _LIKELY.fullmatch(stripped) if stripped and not line.source else None
        if alone is not None and alone[2]:
            voice.block = _Block(line.process, line.pid, line.level, voice.previous, line.number, line.number, None)
            voice.block.exception, voice.block.message = alone[1], [alone[2]]


def find_raised(source: str | bytes | Iterable[Line]) -> tuple[Raised, ...]:
    """Every exception printed in a log or paste, in the order in which they began to be printed."""
    finder = Finder()
    for line in _lines(source):
        finder.feed(line)
    return finder.finish()


def _lines(source: str | bytes | Iterable[Line]) -> Iterator[Line]:
    return read_lines(source) if isinstance(source, str | bytes) else iter(source)
