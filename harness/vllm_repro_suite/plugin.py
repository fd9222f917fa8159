"""pytest plugin: `pytest scenarios` collects a test for each scenario and arm; and a fixture.

The tests are in `vllm_repro_suite.items`.

pytest loads this module in every run of an environment that has this package, so it imports nothing
of ours at the top.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vllm_repro.running.live_server import VllmServer

_REHEARSAL = ("vllm-repro-evidence", "rehearsal")
_SERVER = "vllm-repro-server"
"""Property of a test with the fixture below; `vllm-repro-evidence` is that of a scenario."""
_SERVERS = ("auto", "docker", "process", "lab", "scheduler", "rehearsal")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add pytest's options for scenarios, such as `--scenario-server`."""
    group = parser.getgroup("vllm-repro", "scenarios against live vLLM servers")
    group.addoption(
        "--scenario-server", default="auto", choices=_SERVERS, help="where the vLLM comes from"
    )
    group.addoption("--scenario-image", default=None, help="the image to run")
    group.addoption("--scenario-vllm", default=None, help="the vLLM release")
    group.addoption("--scenario-model", default=None, help="a model instead of the tiny model")
    group.addoption(
        "--scenario-weights",
        default=None,
        choices=("real", "random", "dummy"),
        help="as --weights of vllm-repro run",
    )
    group.addoption(
        "--scenario-no-throughput", action="store_true", help="do not measure throughput"
    )


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a scenario file that lies in a folder `scenarios` or in one of the command line.

    Return None for other files. The next hook collects a file that the command line names.
    """
    session, folder = parent.session, file_path.parent
    if session.isinitpath(file_path) or not (
        folder.name == "scenarios" or session.isinitpath(folder)
    ):
        return None
    return _scenario_file(file_path, parent)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Collector | None:
    """Collect a scenario file in place of pytest's collector, which would import and so run it.

    Return None for other files.
    """
    return _scenario_file(module_path, parent)


def _scenario_file(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Return the collector of a Python file that imports `vocabulary.Scenario`, or None.

    None, too, for names that begin with `_`, `conftest` or `test_`.
    """
    if path.suffix != ".py" or path.name.startswith(("_", "conftest", "test_")):
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    if (
        re.search(
            r"^from vllm_repro\.vocabulary import.*\bScenario\b", text, re.MULTILINE | re.DOTALL
        )
        is None
    ):
        return None
    # here: a second of imports that only scenario files need
    from vllm_repro_suite.items import ScenarioFile

    return ScenarioFile.from_parent(parent, path=path)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print a section for rehearsals and a section for bugs that no longer reproduce."""
    rehearsed = sum(
        any(pair in report.user_properties for pair in (_REHEARSAL, (_SERVER, _REHEARSAL[1])))
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
    )
    if rehearsed:
        terminalreporter.section("REHEARSAL", sep="!", yellow=True, bold=True)
        terminalreporter.line(
            f"{rehearsed} of these ran on the rehearsal engine, which imitates vLLM: they say"
            " nothing about vLLM."
        )
    passed = terminalreporter.stats.get("xpassed", ())
    gone = [
        report
        for report in passed
        if any(name == _REHEARSAL[0] for name, _ in report.user_properties)
    ]
    if gone:
        terminalreporter.section("NO LONGER REPRODUCES", sep="!", red=True, bold=True)
        for report in gone:
            word = "REHEARSAL: " if _REHEARSAL in report.user_properties else ""
            terminalreporter.line(
                f"{word}{report.nodeid}: declared for this release, and the engine lived. Is the"
                " scenario's status right?"
            )


_BOOTED = pytest.StashKey[list["VllmServer"]]()


@pytest.fixture
def vllm_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., VllmServer]]:
    """Return a function that boots a server and takes the arguments of `vllm_repro.VllmServer`.

    Every server ends with the test. If an engine died, the test fails with its root exception,
    whatever the test itself saw. A server leases the GPUs that it needs, so with `-n K` tests share
    none.
    """
    from vllm_repro.running.live_server import VllmServer  # here and below: a second of imports

    booted = request.node.stash.setdefault(_BOOTED, [])
    with contextlib.ExitStack() as servers:

        def boot(command: str, **options: Any) -> VllmServer:
            options.setdefault("folder", tmp_path_factory.mktemp("vllm_server"))
            server = servers.enter_context(VllmServer(command, **options))
            booted.append(server)
            request.node.user_properties.append((_SERVER, server.evidence))
            return server

        yield boot


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Raise `EngineDied` if an engine of the test died, also if the test passed.

    Skips and expected failures stay. If the test failed too, the error has a note of what it saw.
    Then the dead engine may be any running server, also one with a wider scope.
    """
    __tracebackhide__ = True
    servers = item.stash.get(_BOOTED, [])
    try:
        result = yield
    except (
        KeyboardInterrupt,
        SystemExit,
        pytest.exit.Exception,
        pytest.skip.Exception,
        pytest.xfail.Exception,
    ):
        raise
    except BaseException as error:  # pytest.fail is no Exception
        live_server = sys.modules.get("vllm_repro.running.live_server")
        death = _death(
            list(dict.fromkeys([*servers, *(live_server.RUNNING if live_server else ())]))
        )
        if death is None or death is error:
            raise
        death.add_note(f"the test saw {type(error).__name__}: {error}")
        raise death.with_traceback(_lines_in(item.path, error)) from None
    if (death := _death(servers)) is not None:
        raise death.with_traceback(None)
    return result


def _death(servers: list[VllmServer]) -> Exception | None:
    """Return the `EngineDied` of the first dead engine, or another error of its server.

    None if all live, or were closed by the test.
    """
    from vllm_repro.errors import UsageError

    for server in servers:
        try:
            server.assert_alive()
        except UsageError:  # the test closed it
            continue
        except Exception as error:
            return error
    return None


def _lines_in(path: Path, error: BaseException) -> TracebackType | None:
    """Return the traceback of `error` with only the frames of `path`.

    The client has many frames, and they are not the cause.
    """
    lines, chain = error.__traceback__, None
    frames = []
    while lines is not None:
        frames.append(lines)
        lines = lines.tb_next
    for entry in reversed(frames):
        if entry.tb_frame.f_code.co_filename == str(path):
            chain = TracebackType(chain, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return chain
