"""pytest plugin: `pytest scenarios` collects one test for each scenario and arm (`vllm_repro.cli.pytest_items`).

pytest loads this module in every run of an environment that has this package, so it imports nothing of ours at the top.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

_REHEARSAL = ("vllm-repro-evidence", "rehearsal")
_SERVERS = ("auto", "docker", "process", "lab", "rehearsal")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("vllm-repro", "scenarios against live vLLM servers")
    group.addoption("--scenario-server", default="auto", choices=_SERVERS, help="where the vLLM comes from")
    group.addoption("--scenario-image", default=None, help="the image to run")
    group.addoption("--scenario-vllm", default=None, help="the vLLM release")
    group.addoption("--scenario-model", default=None, help="a model instead of the tiny model")
    group.addoption("--scenario-weights", default=None, choices=("real", "dummy"), help="real or dummy")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect scenario files in a folder named `scenarios` or on the command line; a file named there comes by the hook below."""
    session, folder = parent.session, file_path.parent
    if session.isinitpath(file_path) or not (folder.name == "scenarios" or session.isinitpath(folder)):
        return None
    return _scenario_file(file_path, parent)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Take a scenario file away from pytest's own collector, which would import it and so run a stranger's code."""
    return _scenario_file(module_path, parent)


def _scenario_file(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Return the collector of a Python file that imports the vocabulary, wherever it is."""
    if path.suffix != ".py" or path.name.startswith(("_", "conftest", "test_")):
        return None
    text = path.read_text(encoding="utf-8", errors="replace")
    if re.search(r"^from vllm_repro\.vocabulary import", text, re.MULTILINE) is None:
        return None
    from vllm_repro.cli.pytest_items import ScenarioFile  # here: a second of imports that only scenario files need

    return ScenarioFile.from_parent(parent, path=path)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print two sections that must not be overlooked: rehearsals, and bugs that no longer reproduce."""
    rehearsed = sum(
        _REHEARSAL in report.user_properties
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
    )
    if rehearsed:
        terminalreporter.section("REHEARSAL", sep="!", yellow=True, bold=True)
        terminalreporter.line(
            f"{rehearsed} of these ran on the rehearsal engine, which imitates vLLM: they say nothing about vLLM."
        )
    passed = terminalreporter.stats.get("xpassed", ())
    gone = [report for report in passed if any(name == _REHEARSAL[0] for name, _ in report.user_properties)]
    if gone:
        terminalreporter.section("NO LONGER REPRODUCES", sep="!", red=True, bold=True)
        for report in gone:
            word = "REHEARSAL: " if _REHEARSAL in report.user_properties else ""
            terminalreporter.line(
                f"{word}{report.nodeid}: declared for this release, and the engine lived. Is the scenario's status right?"
            )
