"""`vllm-repro check`: the mistakes in scenario files."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from vllm_repro.cli.common import add_common, print_json
from vllm_repro.cli.source_option import source
from vllm_repro.command.flags import loading_flags
from vllm_repro.errors import CommandError, ScenarioError, UsageError
from vllm_repro.releases.request_fields import request_fields
from vllm_repro.report.format import plural
from vllm_repro.scenario.catalogue import all_scenarios, scenario_files, scenario_files_below
from vllm_repro.scenario.checks import Problem
from vllm_repro.scenario.reader import gaps, read
from vllm_repro.scenario.scenario import Scenario


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vllm-repro check` to its parser."""
    add_common(
        parser,
        example="vllm-repro check scenarios/tq_chunked_prefill.py",
        prints="a list of the mistakes, each with file, line and text",
    )
    parser.add_argument(
        "--vllm",
        type=source,
        metavar="SOURCE",
        help="a release in the cache: report body fields of requests that its server does not read",
    )
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="files or folders (default: the package's own)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the problems in scenario files, and the gaps: what a draft does not state yet.

    Return 1 if there is a problem, else 0.
    """
    files = _scenario_files_in([Path(path) for path in arguments.paths])
    fields = request_fields(arguments.vllm) if arguments.vllm else None
    results = {path: read(path, fields=fields) for path in files}
    missing = [gap for path in files if results[path][0] for gap in gaps(path)]
    problems = [problem for _, some in results.values() for problem in some]
    missing += _copies({path: scenario for path, (scenario, _) in results.items() if scenario})
    if arguments.json:
        print_json([asdict(problem) for problem in (*problems, *missing)])
    else:
        # the package's own scenarios need no note
        loads = {path: _code_loading_flags(results[path][0]) for path in files if arguments.paths}
        notes = (
            f"{path}: note: vLLM loads code or uses files of this host with {', '.join(flags)}"
            for path, flags in loads.items()
            if flags
        )
        lines = [*map(str, (*problems, *missing)), *notes]
        print(*lines, sep="\n", end="\n" if lines else "")
        counts = [plural(len(files), "file"), plural(len(problems), "problem")]
        counts += [plural(len(missing), "gap")] if missing else []
        print(", ".join(counts), file=sys.stderr)
    if any(scenario is None for scenario, _ in results.values()):
        print(
            "correct these and check again: a scenario's parts are compared once all its words are"
            " right",
            file=sys.stderr,
        )
    return 1 if problems else 0


def _copies(checked: Mapping[Path, Scenario]) -> Iterator[Problem]:
    """Yield a gap for each scenario that copies the issue and signature of another.

    It is a gap and no problem, because a new scenario may begin as a copy. A copy that
    `same_death_as` declares is no gap. checked: the scenarios by file.
    """
    known = {scenario.id: scenario for scenario in all_scenarios(warn=lambda _: None)}
    for path, scenario in checked.items():
        for other in known.values():
            # Bugs that do not crash the engine have no signature.
            same = (other.issue, other.signature) == (scenario.issue, scenario.signature)
            titles = scenario.signature is not None or other.title == scenario.title
            if same and titles and other.id != scenario.id and "#" in scenario.issue:
                if {other.same_death_as, scenario.same_death_as} & {other.id, scenario.id}:
                    continue
                text = f"gap: a copy of {other.id}, with its issue and signature: state its own"
                before = re.split(r"\bissue *=", path.read_text("utf-8", "replace"))[0]
                line = before.count("\n") + 1
                yield Problem(str(path), line, f"{text}, or name it in same_death_as=")
                break
        known[scenario.id] = scenario


def _code_loading_flags(scenario: Scenario | None) -> list[str]:
    """Return the flags of a scenario with which vLLM loads code or files of this host.

    Empty if its commands cannot be read.
    """
    if scenario is None:
        return []
    try:
        commands = [scenario.reported(), *map(scenario.command_of, scenario.arms)]
    except (CommandError, ScenarioError):  # among the problems
        return []
    return list(
        dict.fromkeys(flag for command in commands for flag in loading_flags(command.flags))
    )


def _scenario_files_in(paths: list[Path]) -> list[Path]:
    """Return the scenario files in `paths`, also below folders; by default the package's own.

    Raises `UsageError` for a path that is missing, or a folder without scenario files.
    """
    if not paths:
        return scenario_files()
    files: list[Path] = []
    for path in paths:
        inside = scenario_files_below(path) if path.is_dir() else [path]
        if not inside or not path.exists():
            what = "no scenario file in " if path.exists() else "no "
            hint = "name scenario files or folders of them"
            raise UsageError(f"there is {what}{path}", hint=hint)
        files += inside
    return files
