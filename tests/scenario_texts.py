"""Arms of scenarios, and scenario text with one change, which `check` reports."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_repro.scenario.catalogue import scenario_files
from vllm_repro.scenario.reader import read
from vllm_repro.scenario.scenario import Arm, Scenario

TQ = "tq_chunked_prefill.py"


def text_of(name: str = TQ) -> str:
    """Return a scenario file, with the head of each arm and each list of texts on one line."""
    path = next(path for path in scenario_files() if path.name == name)
    text = re.sub(r'arm\(\n\s+("[\w-]+"),\n\s+', r"arm(\1, ", path.read_text(encoding="utf-8"))
    return re.sub(r'\[\n((?:\s+"[^"\n]*",\n)+)\s+\]', _on_one_line, text)


def _on_one_line(texts: re.Match[str]) -> str:
    return f"[{', '.join(line.strip(' ,') for line in texts[1].splitlines())}]"


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
    """Return the line on which the first `snippet` begins."""
    text = text_of(name)
    return text[: text.index(snippet)].count("\n") + 1
