"""Starts of a gate's cases: the mixes of the search, and the servers of scenarios."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random

from vllm_repro.errors import UsageError
from vllm_repro.scenario.catalogue import all_scenarios, find
from vllm_repro_explore.case import Case
from vllm_repro_explore.draw import MIXES, draw
from vllm_repro_explore.gate.choose import Start
from vllm_repro_explore.gate.vary import vary
from vllm_repro_explore.scenario_setup import case_from, draw_for, setup_from

_MORE = 0.15
"""Chance of each feature of other mixes in every second case."""


def general_starts(prior: Mapping[str, float]) -> list[Start]:
    """Return where random cases are drawn from for any change: each mix, each scenario's server.

    prior: for each start the expected share of its cases that run changed functions.
    """
    starts = [Start(name=mix, draw=partial(_draw_mix, mix)) for mix in MIXES]
    for scenario in all_scenarios():
        with suppress(UsageError):  # it cannot be played without a server
            setup = setup_from(scenario, scenario.arms[0])
            starts.append(Start(name=scenario.id, draw=partial(draw_for, setup)))
    for start in starts:
        start.prior = prior.get(start.name, 0.0)
    return starts


def _draw_mix(mix: str, seed: int) -> Case:
    """Return the case of a seed and a mix; even seeds add features of other mixes to it."""
    return draw(seed, mix, 0 if seed % 2 else _MORE)


def _near(case: Case, seed: int) -> Case:
    """Return the case for seed 1, and a variation of it for any other seed."""
    return case if seed == 1 else vary(case, Random(seed))


def starts_near(name: str) -> list[Start]:
    """Return the starts of `--fixes`: a scenario's server and workload, or the cases of findings.

    name: a scenario, or a path of findings. Raises `UsageError` if the scenario cannot be played
    without a server, or if the path has no findings.
    """
    path = Path(name)
    if path.exists():
        return _starts_of_findings(path)
    scenario = find(name)
    arm = scenario.arms[0]
    try:
        setup = setup_from(scenario, arm)
    except UsageError as error:
        raise UsageError(
            f"{name} cannot be played without a server: {error}",
            hint=f"vllm-repro run {name} --patch my-change.diff tries it on one",
        ) from error
    starts = [Start(name=scenario.id, draw=partial(draw_for, setup))]
    with suppress(UsageError):
        case = case_from(scenario, arm)
        starts.append(Start(name=f"{scenario.id}, its own workload", draw=partial(_near, case)))
    return starts


def _starts_of_findings(path: Path) -> list[Start]:
    """Return a start for each finding of a folder of `explore` or `gate`, or of findings.jsonl.

    Raises `UsageError` if there is none, or if the file cannot be read.
    """
    file = path / "findings.jsonl" if path.is_dir() else path
    try:
        findings = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        cases = [Case.from_json(finding["case"]) for finding in findings]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"{path} has no findings that can be read: {error}",
            hint="name a folder of reports/explore or reports/gate, or its findings.jsonl",
        ) from error
    if not cases:
        raise UsageError(f"{path} has no finding", hint="name another folder")
    return [
        Start(name=f"{path.name}, finding {place}", draw=partial(_near, case))
        for place, case in enumerate(cases, 1)
    ]
