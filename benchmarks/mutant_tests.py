"""Plugin of pytest that `benchmarks.mutants` uses: run the collected tests once for each mutant, until one fails.

Each mutant has a fork of its own, made before any test ran, so no test leaves a cached result to the next mutant.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

RESULTS = Path("results")
_SECONDS = 60  # a mutant that loops


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--mutants", type=Path, help="file with a name in each line")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    names = session.config.getoption("--mutants").read_text(encoding="utf-8").split()
    mirrored = f"test_{names[0].split('.')[-2]}"
    tests = sorted(session.items, key=lambda test: not test.path.stem.startswith(mirrored))
    if _failing(session, tests, "") is not None:
        raise session.Failed("a test fails without a mutant")
    for name in names:
        failing = _failing(session, tests, name)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(f"{name} {'lived' if failing is None else 'killed'}\n")
        if failing:
            tests.insert(0, tests.pop(failing))  # the next mutant is often of the same function
    return True


def _failing(session: pytest.Session, tests: list[pytest.Item], mutant: str) -> int | None:
    """Return the place of the first test that fails, 0 if the tests do not end, None if all pass."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.environ["MUTANT_UNDER_TEST"] = mutant
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is no result
        signal.alarm(_SECONDS)
        for at, test in enumerate(tests):
            try:
                test.config.hook.pytest_runtest_protocol(item=test, nextitem=None)
            except BaseException:
                session.testsfailed += 1
            if session.testsfailed:
                os.write(writing, str(at).encode())
                os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        failing = pipe.read()
    _, status = os.waitpid(child, 0)
    return int(failing or 0) if status else None
