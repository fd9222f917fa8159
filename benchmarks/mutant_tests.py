"""Pytest plugin of `benchmarks.mutants`: run the tests once for each mutant, until one fails.

Each mutant has a fork of its own, made before any test ran, so no test leaves a cached result to
the next mutant.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from time import process_time

import pytest
from hypothesis import Phase, settings
from mutmut.mutation import trampoline

RESULTS = Path("results")
_NO_MUTANT = "stats"  # mutmut's word: note the functions that are called


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutants", type=Path, help="file with a name in each line")


def pytest_collection() -> None:
    """Make Hypothesis try the same examples for every mutant, without shrinking."""
    settings.register_profile(
        "mutants", settings.default, derandomize=True, phases=[Phase.explicit, Phase.generate]
    )
    settings.load_profile("mutants")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    tests = session.items
    passed = _passing(session, tests, _NO_MUTANT, {})
    if len(passed) < len(tests):
        raise session.Failed("a test fails without a mutant")
    limits = {test: 3 + 3 * time for test, (time, _) in zip(tests, passed, strict=True)}
    called = {test: functions for test, (_, functions) in zip(tests, passed, strict=True)}
    tests.sort(key=limits.__getitem__)
    for name in session.config.getoption("--mutants").read_text(encoding="utf-8").split():
        chosen = [test for test in tests if name.partition("__mutmut_")[0] in called[test]]
        killers = chosen[len(_passing(session, chosen, name, limits)) :]
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(f"{name} {'killed' if killers else 'lived'}\n")
        if killers:
            # the next mutant is often of the same function
            tests.insert(0, tests.pop(tests.index(killers[0])))
    return True


def _passing(
    session: pytest.Session,
    tests: Sequence[pytest.Item],
    mutant: str,
    limits: Mapping[pytest.Item, float],
) -> list[tuple[float, set[str]]]:
    """Run tests in a fork until one fails.

    Return the seconds and the called functions of each that passes.

    limits: of processor time of a test, in seconds, for a mutant that loops.
    """
    reading, writing = Pipe(duplex=False)
    child = os.fork()
    if not child:
        called = set[str]()
        patch = pytest.MonkeyPatch()  # what mutmut has there is slow
        patch.setattr(trampoline, "get_mutant_under_test", lambda: mutant)
        patch.setattr(trampoline, "record_trampoline_hit", lambda name, **_: called.add(name))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is no result
        for test in tests:
            called.clear()
            signal.setitimer(signal.ITIMER_PROF, limits.get(test, 0))
            begin = process_time()
            try:
                test.config.hook.pytest_runtest_protocol(item=test, nextitem=None)
            except BaseException:
                os._exit(1)
            if session.testsfailed:
                os._exit(1)
            writing.send((process_time() - begin, called))
        os._exit(0)
    writing.close()
    passed = []
    with suppress(EOFError):
        while True:
            passed.append(reading.recv())
    os.waitpid(child, 0)
    return passed
