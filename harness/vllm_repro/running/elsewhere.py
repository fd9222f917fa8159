"""Many jobs at once on other machines, such as a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TypeVar

from vllm_repro.running.job import Elsewhere

T = TypeVar("T")
R = TypeVar("R")

_ASKED_EVERY_S = 1.0
"""Seconds between two looks for a signal."""


def results(
    work: Callable[[T], R], items: Sequence[T], elsewhere: Elsewhere | None
) -> Iterator[tuple[T, R]]:
    """Do `work` for each item, here in turn or elsewhere at once; yield each item and its result.

    Work here runs one after the other. Two or more items elsewhere run at once, each in a thread;
    the first to finish comes first. A signal interrupts the jobs elsewhere, and their results still
    come. If one raises, interrupt the others and raise its exception.

    Raises `KeyboardInterrupt` at the end if a signal kept an item from starting.
    """
    if elsewhere is None or len(items) < 2:
        yield from ((item, work(item)) for item in items)
        return
    with ThreadPoolExecutor(len(items)) as threads:
        begun = {threads.submit(work, item): item for item in items}
        pending, never_begun = set(begun), None
        try:
            while pending:
                try:
                    # A wait without timeout ignores a signal that another thread gets.
                    done, pending = wait(pending, _ASKED_EVERY_S, return_when=FIRST_COMPLETED)
                except KeyboardInterrupt as name:
                    elsewhere.interrupt(f"{name}" or "SIGINT")
                    continue
                for future in done:
                    if isinstance(future.exception(), KeyboardInterrupt):
                        never_begun = future.exception()
                    else:
                        yield begun[future], future.result()
            if never_begun is not None:
                raise never_begun
        finally:
            if pending:  # one of them raised
                elsewhere.interrupt("SIGTERM")
