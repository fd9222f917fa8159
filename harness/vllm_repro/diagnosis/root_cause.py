"""Which of all the exceptions in a log is the one that the others follow from.

vLLM hands an exception on through processes: a worker prints it, EngineCore prints a wrapper that quotes its
    text, the API server prints `EngineDeadError`, and on the way out the cleanup fails too. The root is found
    by structure, not by position, because the lines of several processes arrive in any order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_repro.diagnosis.engine_code import CLEANUP, LOOPS
from vllm_repro.diagnosis.tracebacks import Frame, Raised, bare_name

__all__ = ["Root", "find", "squeeze", "unwrap"]


@dataclass(frozen=True)
class Root:
    """The root as printed, and how it was reached.

    wrapped: EngineCore named it only by quoting its text. class_known: False where that quotation is all
        there is.
    quoted: the text inside the wrapper.
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
        """Of the code that failed; the wrapper's own frames say nothing about it."""
        return self.raised.frames if self.class_known else ()

    @property
    def from_engine(self) -> bool:
        return _from_engine(self.raised)

    @property
    def of_termination(self) -> bool:
        """Whether it is what processes print because another one was ended, on purpose or not."""
        return _of_termination(self.raised)

    @property
    def of_lost_peer(self) -> bool:
        """Whether it only says that another rank was gone, which that rank's log explains."""
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
# What code looks up before it says what is really wrong; the exception that follows in the chain is the
# statement.
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
    """White space to single blanks and curly quotes to straight ones: what pasting and wrapping change."""
    return " ".join(text.translate({0x2018: "'", 0x2019: "'", 0x201C: '"', 0x201D: '"'}).split())


def unwrap(message: str) -> str | None:
    """The text that `Worker failed with error '…'` quotes; None where `message` is no such wrapper."""
    found = _WRAPPER.search(message) or _CUT_WRAPPER.search(message)
    return found[1].rstrip() if found else None


def find(raised: Sequence[Raised], *, paste: bool = False) -> Root | None:
    """The root among everything raised in one life of a server; None where nothing in it came from the
    engine.

    `paste`: the text is no log, so an exception counts wherever it seems to come from.
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
        # A rank that lost its peer also speaks: the peer's own exception, if it left one, is what happened.
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
    """The link of a chain that tells what happened: the oldest, unless that was only a look-up that
    failed.
    """
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
