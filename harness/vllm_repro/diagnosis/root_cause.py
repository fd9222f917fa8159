"""Search for the root cause among the exceptions of a log.

vLLM passes an exception on through processes: a worker prints it, EngineCore prints a wrapper that quotes it, the API
server prints `EngineDeadError`, and the cleanup may fail too. The root is found by structure, not by position, because
lines of several processes come in any order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_repro.diagnosis.engine_code import CLEANUP, LOOPS
from vllm_repro.diagnosis.tracebacks import Frame, Raised, bare_name

__all__ = ["Root", "find_root", "squeeze", "unwrap"]


@dataclass(frozen=True)
class Root:
    """The root cause as printed. wrapped: EngineCore only quoted its text. class_known: False if that text is all that is known.
    quoted: the text inside the wrapper."""

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
        return _is_consequence(self.raised)


_WRAPPER = re.compile(r"Worker failed with error '(.*)',\s+please\s+check\s+the\s+stack\s+trace", re.DOTALL)
_CUT_WRAPPER = re.compile(r"Worker failed with error '(.*)", re.DOTALL)
_EMPTY_WRAPPERS = (
    "Engine core initialization failed",
    "Engine process failed to start",
    "WorkerProc initialization failed",
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
_LAST_WORDS = ("EngineCore encountered a fatal error.", "EngineCore failed to start.")
_TERMINATION_CLASSES = frozenset(
    (
        "SystemExit",
        "KeyboardInterrupt",
        "CancelledError",
        "EngineDeadError",
        "BrokenPipeError",
        "EOFError",
        "ZMQError",
    )
)
_TERMINATION_TEXTS = ("cancelled", "Executor failed.")
_CONSEQUENCES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "cancelled",
    "Executor failed.",
)
# Failed look-ups: the next exception of the chain states what is wrong.
_LOOKUPS = frozenset(
    {
        "Again",
        "AttributeError",
        "Empty",
        "ImportError",
        "KeyError",
        "ModuleNotFoundError",
        "StopAsyncIteration",
        "StopIteration",
    }
)


def squeeze(text: str) -> str:
    """Return the text with single blanks and straight quotes, undoing what pasting and wrapping change."""
    return " ".join(text.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}).split())


def unwrap(message: str) -> str | None:
    """Return the text quoted by `Worker failed with error '…'`; None if `message` is no such wrapper."""
    found = _WRAPPER.search(message) or _CUT_WRAPPER.search(message)
    return found[1].rstrip() if found else None


def find_root(raised: Sequence[Raised], *, paste: bool = False) -> Root | None:
    """Return the root cause among all exceptions of one life; None if none came from the engine.

    paste: the text is no log, so exceptions of any process count.
    """
    candidates = [
        one for one in raised if bare_name(one.exception) != "EngineDeadError" and (paste or _from_engine(one))
    ]
    if not candidates:
        return None
    main = (
        next((one for one in candidates if one.headline in _LAST_WORDS), None)
        or next(
            (one for one in candidates if one.frames and not _of_termination(one) and not _empty_wrapper(one)),
            None,
        )
        or next((one for one in candidates if not _of_termination(one)), None)
        or candidates[0]
    )
    root = _through_wrappers(_first_link(main), candidates)
    if any(text in root.message for text in _CONSEQUENCES):
        # A rank that lost its peer logs that too. The peer's own exception is the root, if it logged one.
        own = next((one for one in candidates if _is_block(one) and not _is_consequence(one)), None)
        if own is not None:
            return Root(_first_link(own), wrapped=root.wrapped)
    return root


def _through_wrappers(link: Raised, candidates: Sequence[Raised]) -> Root:
    quoted = unwrap(link.message)
    if quoted is not None:
        wanted = squeeze(quoted)
        for one in candidates:
            first = _first_link(one)
            if any(_quotes(wanted, each) for each in one.links) and unwrap(first.message) is None:
                return Root(first, wrapped=True, quoted=quoted)
        return Root(link, wrapped=True, class_known=False, quoted=quoted)
    if _empty_wrapper(link):
        for one in candidates:
            first = _first_link(one)
            if not _empty_wrapper(first) and not _of_termination(first) and _is_block(one):
                deeper = _through_wrappers(first, candidates)
                return Root(deeper.raised, wrapped=True, class_known=deeper.class_known, quoted=deeper.quoted)
        return Root(link, wrapped=True)
    return Root(link)


def _quotes(wanted: str, raised: Raised) -> bool:
    said = squeeze(raised.message)
    if not wanted or not said:
        # A bare assertion is quoted as ''.
        return (
            wanted == said
            and bool(raised.frames)
            and raised.headline.startswith(("WorkerProc ", "Error getting async"))
        )
    return (
        said == wanted or (len(wanted) > 20 and said.startswith(wanted)) or (len(said) > 20 and wanted.startswith(said))
    )


def _first_link(raised: Raised) -> Raised:
    """Return the oldest link of a chain that is not just a failed look-up."""
    links = raised.links
    for at, link in enumerate(links[:-1]):
        following = links[at + 1]
        lookup = bare_name(link.exception) in _LOOKUPS or (
            bare_name(link.exception) == "TimeoutError" and not link.message
        )
        if not lookup or _in_cleanup(following):
            return link
    return links[-1]


def _empty_wrapper(raised: Raised) -> bool:
    return raised.message.startswith(_EMPTY_WRAPPERS)


def _is_block(raised: Raised) -> bool:
    return bool(raised.frames) and unwrap(raised.message) is None and not _empty_wrapper(raised)


def _is_consequence(raised: Raised) -> bool:
    return _of_termination(raised) or any(text in raised.message for text in _CONSEQUENCES)


def _in_cleanup(raised: Raised) -> bool:
    return bool(CLEANUP.intersection(raised.functions))


def _of_termination(raised: Raised) -> bool:
    link = _first_link(raised)
    return bare_name(link.exception) in _TERMINATION_CLASSES or link.message in _TERMINATION_TEXTS or _in_cleanup(link)


def _from_engine(raised: Raised) -> bool:
    return (
        raised.process.startswith(_ENGINE_NAMES)
        or raised.headline.startswith(_ENGINE_RECORDS)
        or (not raised.process and any(not LOOPS.isdisjoint(link.functions) for link in raised.links))
    )
