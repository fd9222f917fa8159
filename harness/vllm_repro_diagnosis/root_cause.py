"""Search for the root cause among the exceptions of a log.

vLLM passes an exception on through processes: a worker prints it, EngineCore prints a wrapper that quotes it, the API
server prints `EngineDeadError`, and the cleanup may fail too. The root is found by structure, not by position, because
lines of several processes come in any order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_repro_diagnosis.engine_code import CLEANUP, LOOPS, TEARDOWN
from vllm_repro_diagnosis.tracebacks import Frame, Raised, bare_name

__all__ = ["Root", "find_root", "squeeze", "unwrap"]


@dataclass(frozen=True, kw_only=True)
class Root:
    """The root cause as printed.

    wrapped: EngineCore only quoted its text. class_known: False if that text is all that is known. quoted: the text in the wrapper.
    """

    raised: Raised
    wrapped: bool = False
    class_known: bool = True
    quoted: str | None = None

    @property
    def message(self) -> str:
        return self.raised.message if self.class_known or self.quoted is None else self.quoted

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Return the frames of the code that failed, not the wrapper's own."""
        return self.raised.frames if self.class_known else ()

    @property
    def from_engine(self) -> bool:
        return _from_engine(self.raised)

    @property
    def of_termination(self) -> bool:
        """Return True if processes print this because another one ended."""
        return _of_termination(self.raised)

    @property
    def of_lost_peer(self) -> bool:
        """Return True if it only reports that another rank was gone, which that rank's log explains."""
        return any(text in self.raised.message for text in _LOST_PEER)

    @property
    def of_consequence(self) -> bool:
        """Return True if an earlier failure of another process may be its cause."""
        return _is_consequence(self.raised)


_WRAPPER = re.compile(r"Worker failed with error '(.*)',\s+please\s+check\s+the\s+stack\s+trace", re.DOTALL)
_CUT_WRAPPER = re.compile(r"Worker failed with error '(.*)", re.DOTALL)
_EMPTY_WRAPPERS = (
    "Engine core initialization failed",
    "Engine process failed to start",
    "WorkerProc initialization failed",
    "Engine process (pid ",
    "Engine loop has died",
    "Input socket thread died during startup",
)
_ENGINE_NAMES = ("EngineCore", "Worker", "VllmWorker", "RayWorker", "DPEngineCore", "rank")
_ENGINE_RECORDS = (
    "EngineCore ",
    "WorkerProc ",
    "Error getting async model runner output",
    "Process EngineCore",
    "Process VllmWorker",
    "RayWorkerProc ",
)
_LAST_WORDS = ("EngineCore encountered a fatal error.", "EngineCore failed to start.", "Engine background task failed")
_TERMINATION_CLASSES = re.compile(
    "SystemExit|KeyboardInterrupt|CancelledError|(?:Async|MQ)?EngineDeadError|BrokenPipeError|EOFError|ZMQError"
)
_TERMINATION_TEXTS = ("cancelled", "Executor failed.")
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL communicator was aborted",
    "ncclRemoteError",
)
_CONSEQUENCES = (*_LOST_PEER, *_TERMINATION_TEXTS, "RPC call to ")
_MISSED_OUTPUT = "model_runner_output.req_id_to_index["
"""With asynchronous scheduling EngineCore takes the output of a step that failed in a worker for an empty one."""
# Failed look-ups and a wait that was cancelled: the next exception of the chain states what is wrong.
_LOOKUPS = re.compile(
    "Again|AttributeError|CancelledError|Empty|ImportError|KeyError|ModuleNotFoundError|StopAsyncIteration|StopIteration"
)


def squeeze(text: str) -> str:
    """Return the text with single blanks and straight quotes, undoing what pasting and wrapping change."""
    return " ".join(text.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}).split())


def unwrap(message: str) -> str | None:
    """Return the text quoted by `Worker failed with error '…'`; None if `message` is no such wrapper."""
    found = _WRAPPER.search(message) or _CUT_WRAPPER.search(message)
    return found[1].rstrip() if found else None


def find_root(raised: Sequence[Raised], *, paste: bool = False, survived: int = 0) -> Root | None:
    """Return the root cause among all exceptions of one life; None if none came from the engine.

    paste: the text is no log, so exceptions of any process count.
    """
    known = [one for one in raised if not _first_link(one).of_dead_engine]
    from_engine = [one for one in known if _from_engine(one)]
    # A pasted text has no process names: prefer what an engine raised, then what passed through vLLM.
    in_vllm = [one for one in known if any("vllm" in frame.file for frame in one.frames)]
    candidates = from_engine or (in_vllm or known if paste else [])
    if not candidates:
        return None
    preferences: tuple[Callable[[Raised], bool], ...] = (
        lambda one: one.headline in _LAST_WORDS,
        lambda one: bool(one.frames) and not _of_termination(one) and not _empty_wrapper(one),
        lambda one: not _of_termination(one),
        lambda _: True,
    )
    main = next(one for wanted in preferences for one in candidates if wanted(one))
    fresh = [one for one in candidates if one is main or (one.first_line > survived and one.level != "WARNING")]
    root = _through_wrappers(_first_link(main), candidates, fresh)
    if any(text in root.message for text in _CONSEQUENCES) or _misses_output(root.raised):
        # A rank that lost its peer logs that too. The peer's own exception is the root, if it logged one.
        own = next((one for one in fresh if _is_block(one) and not _is_consequence(one)), None)
        if own is not None:
            return Root(raised=_first_link(own), wrapped=root.wrapped)
    return root


def _through_wrappers(link: Raised, candidates: Sequence[Raised], fresh: Sequence[Raised]) -> Root:
    quoted = unwrap(link.message)
    if quoted is not None:
        wanted = squeeze(quoted)
        for one in candidates:
            first = _first_link(one)
            if any(_quotes(wanted, each) for each in one.links) and unwrap(first.message) is None:
                return Root(raised=first, wrapped=True, quoted=quoted)
        return Root(raised=link, wrapped=True, class_known=False, quoted=quoted)
    if _empty_wrapper(link):
        for one in fresh:
            first = _first_link(one)
            if not _empty_wrapper(first) and not _of_termination(first) and _is_block(one):
                return Root(raised=first, wrapped=True)
        return Root(raised=link, wrapped=True)
    return Root(raised=link)


def _quotes(wanted: str, raised: Raised) -> bool:
    message = squeeze(raised.message)
    if not wanted and not message:
        # A bare assertion is quoted as ''.
        return bool(raised.frames) and raised.headline.startswith(("WorkerProc ", "Error getting async"))
    shorter, longer = sorted((wanted, message))  # the beginning of a text sorts before it
    return wanted == message or (len(shorter) > 20 and longer.startswith(shorter))


def _first_link(raised: Raised) -> Raised:
    """Return the oldest link of a chain that is not just a failed look-up."""
    links = raised.links
    for at, link in enumerate(links[:-1]):
        following = links[at + 1]
        name = bare_name(link.exception)
        lookup = _LOOKUPS.fullmatch(name) or (name == "TimeoutError" and not link.message)
        if not lookup or _in_cleanup(following):
            return link
    return links[-1]


def _empty_wrapper(raised: Raised) -> bool:
    return raised.message.startswith(_EMPTY_WRAPPERS)


def _is_block(raised: Raised) -> bool:
    return bool(raised.frames or raised.native) and unwrap(raised.message) is None and not _empty_wrapper(raised)


def _is_consequence(raised: Raised) -> bool:
    return _of_termination(raised) or _misses_output(raised) or any(text in raised.message for text in _CONSEQUENCES)


def _misses_output(raised: Raised) -> bool:
    return any(_MISSED_OUTPUT in frame.source for frame in raised.frames[-1:])


def _in_cleanup(raised: Raised) -> bool:
    return bool(CLEANUP.intersection(raised.functions))


def _of_termination(raised: Raised) -> bool:
    link = _first_link(raised)
    by_class = _TERMINATION_CLASSES.fullmatch(bare_name(link.exception)) is not None
    return by_class or link.message in _TERMINATION_TEXTS or bool(TEARDOWN.intersection(link.functions))


def _from_engine(raised: Raised) -> bool:
    return (
        raised.native
        or raised.process.startswith(_ENGINE_NAMES)
        or raised.headline.startswith(_ENGINE_RECORDS)
        or (not raised.process and any(not LOOPS.isdisjoint(link.functions) for link in raised.links))
    )
