"""The pytest file of a finding: short, and without this package.

tests/live runs it on real releases.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from vllm_repro.errors import UsageError
from vllm_repro.scenario.catalogue import find
from vllm_repro.scenario.workload import completion
from vllm_repro_explore.case import Case, Request, Setup
from vllm_repro_explore.scenario_setup import draw_for
from vllm_repro_explore.scheduler_test import finding_test, scenario_test

CONNECTORS = ("", "SimpleCPUOffloadConnector", "OffloadingConnector", "MultiConnector")
LATE = ((Request(40, 2, 8, 1, 3), Request(30, 2, 8)),)


def finding(
    case: Case, kind: str = "death", site: str = "AssertionError in popleft_n"
) -> dict[str, Any]:
    return {"kind": kind, "site": site, "detail": "seen", "known": None, "case": case.as_json()}


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (
                (name.name.partition(".")[0], name.asname or name.name) for name in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            yield from (
                (str(node.module).partition(".")[0], name.asname or name.name)
                for name in node.names
            )


@pytest.mark.parametrize(
    "name", ["sco-lazy-starves", "sco-lazy-never-rests", "sco-window-loads-wait", "sco-hybrid"]
)
def test_it_is_short(name: str) -> None:
    lines = scenario_test(find(name)).splitlines()
    assert sum(map(bool, map(str.strip, lines))) <= 150
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("waves", [((Request(100, 8),),), LATE])
@pytest.mark.parametrize("more", [{}, {"asynchronous": True, "runner": 2}, {"draft": 3}])
def test_it_needs_vllm_and_torch_alone_and_has_what_it_uses(
    connector: str, waves: Any, more: dict[str, Any]
) -> None:
    tree = ast.parse(
        finding_test(finding(Case(Setup(connector=connector, **more), waves, 1)), "0.32.0")
    )
    modules, names = map(set, zip(*imports(tree), strict=True))
    assert modules - sys.stdlib_module_names == {"torch", "vllm"}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert names <= used | {"planning"}
    flags = {
        "CONNECTOR": bool(connector),
        "DRAFT": bool(more.get("draft")),
        "RequestStatus": waves is LATE,
    }
    assert {name: name in used for name in flags} == flags


@pytest.mark.parametrize("seed", range(1, 40))
def test_it_has_every_request_of_the_case(seed: int) -> None:
    case = draw_for(Setup(connector="SimpleCPUOffloadConnector"), seed)
    text = finding_test(finding(case), "0.32.0")
    (waves,) = (
        line
        for line in ast.parse(text).body
        if isinstance(line, ast.Assign) and "WAVES" in ast.unparse(line)
    )
    played = eval(ast.unparse(waves.value))
    plain = {"shared": 0, "after": 0, "abort": -1}
    assert (
        Case.numbered(
            case.setup, [[Request(**plain | one) for one in wave] for wave in played], case.seed
        )
        == case
    )


def test_what_has_none_says_so() -> None:
    case = Case(Setup(), ((Request(100, 8),),), 1)
    for one in (
        finding(case, "corrupted", "store-listed-twice"),
        finding(case, "stuck", "one step never ends"),
    ):
        with pytest.raises(UsageError, match="no test shows this finding"):
            finding_test(one, "0.32.0")
    hybrid = find("sco-hybrid")
    with pytest.raises(UsageError, match="changes vLLM's source"):
        scenario_test(hybrid, hybrid.arm("patched"))
    with pytest.raises(UsageError, match="dsv4-tp2 has no server that can be played"):
        scenario_test(find("dsv4-tp2"))
    words = replace(hybrid, workload=(completion(prompt="hello"),))
    with pytest.raises(UsageError, match="does not state the length"):
        scenario_test(words)
