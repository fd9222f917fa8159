"""`vllm-repro list`: the scenarios of the package."""

from __future__ import annotations

import argparse

from vllm_repro.cli.common import add_common, print_json
from vllm_repro.report.format import columns
from vllm_repro.scenario.catalogue import all_scenarios, scenario_ids, to_stderr

_WIDEST = 200


def add(parser: argparse.ArgumentParser) -> None:
    add_common(parser, example="vllm-repro list --json", prints="a list of the scenarios")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also print titles, arms and files"
    )


def run(arguments: argparse.Namespace) -> int:
    scenarios = all_scenarios(warn=to_stderr)
    if arguments.json:
        print_json(
            [
                {
                    "scenario": scenario.id,
                    "issue": scenario.issue,
                    "filed": scenario.filed,
                    "title": scenario.title,
                    "phase": scenario.phase,
                    "needs": {
                        "gpus": scenario.needs.gpus,
                        "gpu_memory_gb": scenario.needs.gpu_memory_gb,
                        "nodes": scenario.needs.nodes,
                    },
                    "status": "open" if scenario.status.open else "fixed",
                    "first_bad": scenario.status.first_bad,
                    "first_good": scenario.status.first_good,
                    "arms": [arm.name for arm in scenario.arms],
                }
                for scenario in scenarios
            ]
        )
        return 0
    rows = [("scenario", "issue", "shows in", "needs", "status", "first bad", "first good")]
    rows += [
        (
            scenario.id,
            scenario.issue if scenario.filed else f"none; see {scenario.issue}",
            scenario.phase or "any phase",
            str(scenario.needs),
            "open" if scenario.status.open else "fixed",
            scenario.status.first_bad or "-",
            scenario.status.first_good or "-",
        )
        for scenario in scenarios
    ]
    for line in columns(rows, [_WIDEST] * len(rows[0])):
        print(line)
    if arguments.verbose:
        files = scenario_ids()
        for scenario in scenarios:
            print(
                f"\n{scenario.id}: {scenario.title}\n  arms:"
                f" {', '.join(arm.name for arm in scenario.arms)}"
            )
            print(f"  file: {files[scenario.id]}")
    return 0
