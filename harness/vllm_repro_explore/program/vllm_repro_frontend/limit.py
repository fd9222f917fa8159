"""Limit of the processor time that vLLM's code gets for an answer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_MOST_S = 10.0
"""Most answers take a millisecond. Processor time, so that other load changes no answer."""


class HungError(BaseException):
    """vLLM's code took too long. No `Exception`: parsers catch all of those."""


def _raise(*_: object) -> None:
    raise HungError


@contextmanager
def limited() -> Iterator[None]:
    """Raise `HungError` in the block if it takes more than 10 s of processor time."""
    signal.signal(signal.SIGVTALRM, _raise)
    signal.setitimer(signal.ITIMER_VIRTUAL, _MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def failure_of(error: BaseException) -> str:
    """Return in words how vLLM's code failed."""
    return "hangs" if isinstance(error, HungError) else f"raises {type(error).__name__}"
