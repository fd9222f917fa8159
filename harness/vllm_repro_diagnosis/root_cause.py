"""Search for the root cause among the exceptions of a log.

vLLM passes an exception on through processes: a worker prints it, EngineCore prints a wrapper that
quotes it, the API server prints `EngineDeadError`, and the cleanup may fail too. The search goes by
structure, not by position, because lines of several processes come in any order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm_repro_diagnosis.canonical import squeeze
from vllm_repro_diagnosis.engine_code import (
    CLEANUP,
    LOOPS,
    TEARDOWN,
    leaves_the_engine,
    of_one_call,
)
from vllm_repro_diagnosis.tracebacks import ENGINE_NAMES, Frame, Raised, bare_name, is_core


@dataclass(frozen=True, kw_only=True)
class Root:
    """Exception to report as the cause: the log printed it, or another exception quotes its text.

    Such a wrapper is EngineCore's `Worker failed with error '…'`.
    """

    # the exception itself; the wrapper if the log holds only its text
    raised: Raised
    # a wrapper reports it
    wrapped: bool = False
    # False if the log holds no more than the quoted text
    class_known: bool = True
    # the text in the wrapper
    quoted: str | None = None
    # the last exception of its chain
    last: Raised | None = field(default=None, compare=False)

    @property
    def printed(self) -> Raised:
        """Return the last exception of its chain; `links` of that one are the whole chain."""
        return self.last or self.raised

    @property
    def message(self) -> str:
        """Return its message, or the part of it that a wrapper quotes if only that is known."""
        return self.raised.message if self.class_known or self.quoted is None else self.quoted

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Return its frames, outermost first; empty if the log holds only its quoted text."""
        return self.raised.frames if self.class_known else ()

    @property
    def from_engine(self) -> bool:
        """Return True if an engine or a worker raised it, not the API server or a client."""
        return _from_engine(self.printed)

    @property
    def of_termination(self) -> bool:
        """Return True if it is printed because a process ends: an exit, cleanup, dead engine."""
        return _of_termination(self.raised)

    @property
    def of_lost_peer(self) -> bool:
        """Return True if it only reports a lost connection to another rank; see that rank's log."""
        return any(text in self.raised.message for text in _LOST_PEER)

    @property
    def of_unknown_cause(self) -> bool:
        """Return True if it only reports that a process failed, without its exception."""
        return _empty_wrapper(self.raised)

    @property
    def caught(self) -> bool:
        """Return True if code of vLLM caught it and logged it below a line of its own."""
        headline = self.printed.headline
        reports = ("Traceback", *_ENGINE_RECORDS, *_LAST_WORDS)
        return bool(self.printed.level and headline) and not headline.startswith(reports)

    @property
    def of_consequence(self) -> bool:
        """Return True if an earlier failure of another process may be its cause."""
        return _is_consequence(self.raised)


_WRAPPER = re.compile(
    r"Worker failed with error '(.*)',\s+please\s+check\s+the\s+stack\s+trace", re.DOTALL
)
_CUT_WRAPPER = re.compile(r"Worker failed with error '(.*)", re.DOTALL)
# wrappers that quote nothing
_EMPTY_WRAPPERS = (
    "Engine core initialization failed",
    "Engine process failed to start",
    "WorkerProc initialization failed",
    "Engine process (pid ",
    "Engine loop has died",
    "Input socket thread died during startup",
)
_ENGINE_RECORDS = (
    "EngineCore ",
    "WorkerProc ",
    "Error getting async model runner output",
    "Error executing method '",
    "Process EngineCore",
    "Process VllmWorker",
    "RayWorkerProc ",
)
_LAST_WORDS = (
    "EngineCore encountered a fatal error.",
    "EngineCore failed to start.",
    "Engine background task failed",
)
_TERMINATION_CLASSES = re.compile(
    "SystemExit|KeyboardInterrupt|CancelledError|(?:Async|MQ)?EngineDeadError|BrokenPipeError"
    "|EOFError|ZMQError"
)
_TERMINATION_TEXTS = ("cancelled", "Executor failed.")
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "remote process exited or there was a network error",
    "ms for recv operation to complete",
    "ms for send operation to complete",
)
_CONSEQUENCES = (
    *(*_LOST_PEER, *_TERMINATION_TEXTS),
    *("RPC call to ", "The actor died unexpectedly", "due to a previous error"),
)
_MISSED_OUTPUT = "model_runner_output.req_id_to_index["
"""With asynchronous scheduling EngineCore takes the output of a failed step for an empty output."""
# Failed look-ups and a cancelled wait: the next exception of the chain states what is wrong.
_LOOKUPS = re.compile(
    "Again|AttributeError|CancelledError|Empty|ImportError|KeyError|ModuleNotFoundError"
    "|StopAsyncIteration|StopIteration"
)


_TELLING = 20
"""Fewest characters by which a message alone is recognized."""


def unwrap(message: str) -> str | None:
    """Return the text in `Worker failed with error '…'`; None if `message` is no such wrapper."""
    match = _WRAPPER.search(message) or _CUT_WRAPPER.search(message)
    return match[1].rstrip() if match else None


def find_root(raised: Sequence[Raised], *, paste: bool = False, survived: float = 0) -> Root | None:
    """Return the root cause among the exceptions of a server's life; None if no engine raised one.

    paste: the text is pasted, not a log; if no exception is an engine's, all of them count.
    survived: line up to which the engine survived its exceptions.
    """
    candidates = _candidates(
        [each for each in raised if not each.native or each.first_line > survived], paste
    )
    # torch logs errors from which it recovers, so they count only if a wrapper quotes them
    told = [each for each in candidates if not _by_torch(each)]
    if not told:
        return None
    late = [
        each
        for each in told
        if each.first_line > survived and each.frames and not of_one_call(each)
    ]
    main = _starting_exception([each for each in late if not _of_termination(each)] or told)
    fresh = [each for each in told if each is main or _is_fresh(each, survived)]
    root = _behind_wrapper(main, candidates, fresh)
    if any(text in root.message for text in _CONSEQUENCES) or _misses_output(root.raised):
        # A rank that lost its peer logs a consequence. The peer's own exception is the root, if it
        # logged any.
        for each in fresh:
            if _is_original(each) and not _is_consequence(each):
                return Root(raised=_first_link(each), wrapped=root.wrapped, last=each)
    return root


def _candidates(raised: Sequence[Raised], paste: bool) -> list[Raised]:
    """Return the exceptions among which the root is: those of an engine.

    Of a pasted text without them: those with a frame of vLLM, else all. Reports of a dead engine
    and exceptions of side threads are left out.
    """
    causes = [
        each for each in raised if not _first_link(each).of_dead_engine and not each.of_side_thread
    ]
    from_engine = [each for each in causes if _from_engine(each)]
    if from_engine or not paste:
        return from_engine
    # A pasted text has no process names: prefer exceptions that passed through vLLM.
    return [each for each in causes if any("vllm" in frame.file for frame in each.frames)] or causes


def _starting_exception(candidates: Sequence[Raised]) -> Raised:
    """Return the exception at which the search for the root begins.

    It is the first below a line such as "EngineCore encountered a fatal error.". Else it is the
    first that left the engine's step or boot, else with frames, else any, that is not only printed
    because a process ended; else the first of all. candidates: at least one.
    """

    def telling(each: Raised) -> bool:
        """Return True if it has frames and is not only printed because a process ended."""
        return bool(each.frames) and not _of_termination(each) and not _empty_wrapper(each)

    preferences: tuple[Callable[[Raised], bool], ...] = (
        lambda each: each.headline in _LAST_WORDS,
        lambda each: leaves_the_engine(each) and telling(each),
        telling,
        lambda each: not _of_termination(each),
    )
    for preferred in preferences:
        for each in candidates:
            if preferred(each):
                return each
    return candidates[0]


def _by_torch(raised: Raised) -> bool:
    """Return True if torch's logger printed it."""
    return "torch/_" in raised.source


def _is_fresh(raised: Raised, survived: float) -> bool:
    """Return True if it came after the last proof that the engine lived, and is no warning."""
    return raised.first_line > survived and raised.level != "WARNING"


def _behind_wrapper(main: Raised, candidates: Sequence[Raised], fresh: Sequence[Raised]) -> Root:
    """Return the exception that `main` wraps, else the first of the chain of `main`.

    A wrapper quotes another exception ("Worker failed with error '…'"), which is searched in
    `candidates`, or only reports that a process failed. Then `fresh` is searched: the exceptions
    after the last sign of a living engine.
    """
    link = _first_link(main)
    quoted = unwrap(link.message)
    if quoted is not None:
        text = squeeze(quoted)
        for quotes in (_quotes, _ends_with):
            for each in candidates:
                first = _first_link(each)
                if unwrap(first.message) is None and any(quotes(text, part) for part in each.links):
                    return Root(raised=first, wrapped=True, quoted=quoted, last=each)
        return Root(raised=link, wrapped=True, class_known=False, quoted=quoted, last=main)
    if _empty_wrapper(link):
        for each in fresh:
            first = _first_link(each)
            if not _empty_wrapper(first) and not _of_termination(first) and _is_original(each):
                return Root(raised=first, wrapped=True, last=each)
        return Root(raised=link, wrapped=True, last=main)
    return Root(raised=link, last=main)


def _quotes(text: str, raised: Raised) -> bool:
    """Return True if a wrapper's text is this exception's message, perhaps cut."""
    message = squeeze(raised.message)
    if not text and not message:
        # A bare assertion is quoted as ''.
        of_worker = raised.headline.startswith(("WorkerProc ", "Error getting async"))
        return bool(raised.frames) and of_worker
    shorter, longer = sorted((text, message))  # the beginning of a text sorts before it
    return text == message or (len(shorter) > _TELLING and longer.startswith(shorter))


def _ends_with(text: str, raised: Raised) -> bool:
    """Return True if a wrapper's text ends with this error's message, behind words of its own."""
    message = squeeze(raised.message)
    return len(message) > _TELLING and text.endswith(message) and raised.level != "WARNING"


def _first_link(raised: Raised) -> Raised:
    """Return the oldest link of an exception's chain that is not just a failed look-up."""
    links = raised.links
    for at, link in enumerate(links[:-1]):
        following = links[at + 1]
        name = bare_name(link.exception)
        lookup = (_LOOKUPS.fullmatch(name) and "shared object" not in link.message) or (
            name == "TimeoutError" and not link.message
        )
        # a timeout cancels the wait, and its context manager raises it in `__aexit__`
        timed_out = name == "CancelledError" and bare_name(following.exception) == "TimeoutError"
        in_cleanup = CLEANUP.intersection(following.functions) and not timed_out
        if not lookup or in_cleanup or following.of_dead_engine:
            return link
    return links[-1]


def _empty_wrapper(raised: Raised) -> bool:
    """Return True if it only reports that an engine's process failed, and does not quote why."""
    return raised.message.startswith(_EMPTY_WRAPPERS)


def _is_original(raised: Raised) -> bool:
    """Return True if it has frames or is C++ code's, and does not only wrap another exception."""
    return (
        bool(raised.frames or raised.native)
        and unwrap(raised.message) is None
        and not _empty_wrapper(raised)
    )


def _is_consequence(raised: Raised) -> bool:
    """Return True if the end or failure of another process may be its only cause."""
    return (
        _of_termination(raised)
        or _misses_output(raised)
        or any(text in raised.message for text in _CONSEQUENCES)
    )


def _misses_output(raised: Raised) -> bool:
    """Return True if it looks up the output of a step that had failed."""
    return any(_MISSED_OUTPUT in frame.source for frame in raised.frames[-1:])


def _of_termination(raised: Raised) -> bool:
    """Return True if it is printed because a process ends, such as `EngineDeadError`."""
    link = _first_link(raised)
    by_class = _TERMINATION_CLASSES.fullmatch(bare_name(link.exception)) is not None
    return (
        by_class
        or link.message in _TERMINATION_TEXTS
        or bool(TEARDOWN.intersection(link.functions))
    )


def _from_engine(raised: Raised) -> bool:
    """Return True if an engine or a worker raised it, by process, headline or functions."""
    return (
        raised.native
        or raised.process.startswith((*ENGINE_NAMES, "rank"))
        or raised.headline.startswith(_ENGINE_RECORDS)
        or is_core(raised.process, raised.source)
        or _by_torch(raised)
        or (
            not raised.process
            # the first frames of a traceback may be missing
            and any(
                not LOOPS.isdisjoint(link.functions) or leaves_the_engine(link)
                for link in raised.links
            )
        )
    )
