"""Catalogue of scenarios: those of the package, of the folders in `$VLLM_REPRO_SCENARIOS`, and files named by the caller."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from vllm_repro.errors import ScenarioError, UsageError
from vllm_repro.resources import scenario_folder
from vllm_repro.scenario.reader import load_file
from vllm_repro.scenario.scenario import Arm, Scenario

__all__ = ["FOLDERS", "all_scenarios", "find", "find_arms", "scenario_files", "to_stderr"]


FOLDERS = "VLLM_REPRO_SCENARIOS"
"""Variable with folders of more scenarios, separated by `:`. `--scenarios DIR` sets it."""


def scenario_files(folder: Path | None = None) -> list[Path]:
    """Return the scenario files of a folder, without `_*.py` and `conftest.py`; by default of the package and of `FOLDERS`.

    Raises `UsageError` if `FOLDERS` names something that is no folder.
    """
    more = [Path(name) for name in os.environ.get(FOLDERS, "").split(os.pathsep) if name]
    if missing := next((path for path in more if not path.is_dir()), None):
        raise UsageError(f"{missing} is no folder of scenarios", hint=f"--scenarios and {FOLDERS} take folders")
    folders = [folder] if folder else [scenario_folder(), *more]
    found = (path for one in folders for path in sorted(one.glob("*.py")))
    return [path for path in found if not path.name.startswith(("_", "conftest"))]


def scenario_files_below(folder: Path) -> list[Path]:
    """Return the scenario files of a folder, or else those of the folders named `scenarios` below it."""
    own = [path for path in scenario_files(folder) if b"vllm_repro.vocabulary" in path.read_bytes()]
    below = (found for found in sorted(folder.glob("*/scenarios")) if found.is_dir())
    if not own and (folder / "scenarios").is_dir():
        return scenario_files(folder / "scenarios")
    return own or [path for found in below for path in scenario_files(found)]


def all_scenarios(folder: Path | None = None, *, warn: Callable[[str], None] | None = None) -> list[Scenario]:
    """Return every scenario of a folder, by default the package's.

    A wrong file is left out and reported to `warn`. Without `warn` it raises `ScenarioError`.
    """
    found: list[Scenario] = []
    for path in scenario_files(folder):
        try:
            found.append(load_file(path))
        except ScenarioError as error:
            if warn is None:
                raise
            warn(f"left out: {error}")
    return found


def to_stderr(text: str) -> None:
    """Print a warning of the command line."""
    print(f"vllm-repro: {text}", file=sys.stderr)


def find(name: str) -> Scenario:
    """Return a scenario by its id, its issue number or the path of its file. Raises `UsageError` with similar names."""
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise UsageError(f"no scenario file at {name}", hint="vllm-repro list shows the scenarios of the package")
        return load_file(path)
    files = {path.stem.replace("_", "-"): path for path in scenario_files()}
    if name in files:
        return load_file(files[name])
    number = name.lstrip("#")
    by_issue = [it for it in all_scenarios(warn=to_stderr) if number in (it.issue, it.issue.partition("#")[2])]
    if len(by_issue) == 1:
        return by_issue[0]
    near = [known for known in files if known.startswith(name)] or difflib.get_close_matches(
        name, files, n=3, cutoff=0.4
    )
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"no scenario is named {name!r}", hint=f"{meant}There are: {', '.join(files)}")


def find_arms(scenario: Scenario, names: list[str] | None) -> list[Arm]:
    """Return the named arms in the scenario's order; all of them for `all` or without names."""
    known = [arm.name for arm in scenario.arms]
    if names and "all" in names:
        return list(scenario.arms)
    for name in names or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"{scenario.id} has no arm {name!r}", hint=f"{meant}It has: {', '.join(known)}")
    return [arm for arm in scenario.arms if not names or arm.name in names]
