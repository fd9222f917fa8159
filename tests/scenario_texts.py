"""Arms of scenarios, and scenario text with one change, which `check` reports."""

from __future__ import annotations

from pathlib import Path

from vllm_repro.scenario.catalogue import scenario_files
from vllm_repro.scenario.reader import read
from vllm_repro.scenario.scenario import Arm, Scenario

TQ = "tq_chunked_prefill.py"


def text_of(name: str = TQ) -> str:
    return next(path for path in scenario_files() if path.name == name).read_text(encoding="utf-8")


def arm_of(scenario: Scenario, name: str) -> Arm:
    arm = scenario.arm(name)
    assert arm is not None, name
    return arm


def problems(text: str, name: str = TQ) -> list[tuple[int, str]]:
    return [(problem.line, problem.text) for problem in read(Path(name), text)[1]]


def broken(old: str, new: str, name: str = TQ) -> list[tuple[int, str]]:
    text = text_of(name)
    assert old in text, old
    return problems(text.replace(old, new, 1), name)


def line_of(snippet: str, name: str = TQ) -> int:
    return next(n for n, line in enumerate(text_of(name).splitlines(), 1) if snippet in line)
