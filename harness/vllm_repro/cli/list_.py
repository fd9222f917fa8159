"""`vllm-repro list`: the scenarios of the package."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from textwrap import TextWrapper

from vllm_repro.cli.common import add_common, print_json
from vllm_repro.cli.show import STYLES
from vllm_repro.errors import UsageError
from vllm_repro.features import additions, load
from vllm_repro.releases.known import RELEASES
from vllm_repro.report.format import columns, terminal_width
from vllm_repro.report.script import no_script
from vllm_repro.scenario.catalogue import all_scenarios, scenario_ids, to_stderr
from vllm_repro.scenario.ledger import ledger_values, strongest_evidence
from vllm_repro.scenario.scenario import Scenario, Status
from vllm_repro.verdict.verdict import Standing

_WIDEST = 200


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vllm-repro list` to its parser."""
    add_common(parser, example="vllm-repro list --json", prints="a list of the scenarios")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also print issues, needs, arms, forms, files"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the known scenarios, and return 0."""
    scenarios = all_scenarios(warn=to_stderr)
    if arguments.json:
        print_json(list(map(_scenario_values, scenarios)))
        return 0
    rows = [("scenario", "title", "crashes in", "evidence")]
    for scenario in scenarios:
        seen = strongest_evidence(scenario.id)
        rows.append((scenario.id, scenario.title, crashes_in(scenario.status), seen))
    print(*columns(rows, [_WIDEST] * len(rows[0]), terminal_width()), sep="\n")
    files = scenario_ids() if arguments.verbose else {}
    for scenario in scenarios if arguments.verbose else ():
        print("", *_details(scenario, files[scenario.id]), sep="\n")
    return 0


def _details(scenario: Scenario, file: Path) -> list[str]:
    """Return what `list -v` prints about a scenario, wrapped at the terminal's width."""
    nearest = "" if scenario.filed else "none found; related, not this bug: "
    lines = (
        f"{scenario.id}: {scenario.title}",
        f"  issue: {nearest}{scenario.issue}",
        f"  shows in: {scenario.phase or 'any phase'}",
        f"  needs: {scenario.needs}",
        f"  declared: {scenario.status}",
        f"  arms: {', '.join(arm.name for arm in scenario.arms)}",
        f"  show --as {', '.join(_forms(scenario))}",
        f"  file: {file}",
    )
    wrapper = TextWrapper(
        terminal_width(), subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return [wrapper.fill(line) for line in lines]


def crashes_in(status: Status) -> str:
    """Return the known releases that are declared bad, as text.

    `0.20.0 to 0.21.0`; `0.20.0 on` if the newest is bad; `a branch only` if none is.
    """
    bad = [release for release in RELEASES if status.standing(release) is Standing.BAD]
    if not bad:
        return "a branch only"
    return f"{bad[0]} on" if bad[-1] == RELEASES[-1] else f"{bad[0]} to {bad[-1]}"


def _scenario_values(scenario: Scenario) -> dict[str, object]:
    """Return what `list --json` prints about a scenario."""
    return {
        "scenario": scenario.id,
        "issue": scenario.issue,
        "filed": scenario.filed,
        **ledger_values(scenario.id),
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
        "forms": _forms(scenario),
    }


def _forms(scenario: Scenario) -> list[str]:
    """Return the values of `show --as` that the scenario's first arm has."""
    lacking = {"python", "curl"} if no_script(scenario) else set()
    lacking |= set() if scenario.lab else {"lab"}
    forms = [style for style in STYLES if style not in lacking]
    for form in additions("show_forms"):
        with contextlib.suppress(UsageError):
            load("show_forms", form)(scenario, scenario.arms[0])
            forms.append(form)
    return forms
