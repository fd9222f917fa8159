"""The scenarios that there are: those of the package, and files that the caller names."""

from __future__ import annotations

import difflib
from pathlib import Path

from vllm_repro.errors import UsageError
from vllm_repro.resources import scenario_folder
from vllm_repro.scenario import Arm, Scenario
from vllm_repro.scenario_file import load_file

__all__ = ["all_scenarios", "find", "find_arms", "scenario_files"]


def scenario_files(folder: Path | None = None) -> list[Path]:
    """The scenario files of a folder, without Python's own and pytest's."""
    where = folder or scenario_folder()
    return sorted(path for path in where.glob("*.py") if not path.name.startswith(("_", "conftest")))


def all_scenarios(folder: Path | None = None) -> list[Scenario]:
    """Every scenario of the package; raises `ScenarioError` where a file is wrong."""
    return [load_file(path) for path in scenario_files(folder)]


def find(name: str) -> Scenario:
    """A scenario by its id, or by the path of its file. Raises `UsageError` naming the near ones."""
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise UsageError(f"no scenario file at {name}", hint="vllm-repro list shows the scenarios of the package")
        return load_file(path)
    files = {path.stem.replace("_", "-"): path for path in scenario_files()}
    if name in files:
        return load_file(files[name])
    near = difflib.get_close_matches(name, files, n=3, cutoff=0.4)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"no scenario is named {name!r}", hint=f"{meant}There are: {', '.join(files)}")


def find_arms(scenario: Scenario, names: list[str] | None) -> list[Arm]:
    """The arms by name, in the scenario's order; all of them where none is named."""
    known = [arm.name for arm in scenario.arms]
    for name in names or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"{scenario.id} has no arm {name!r}", hint=f"{meant}It has: {', '.join(known)}")
    return [arm for arm in scenario.arms if not names or arm.name in names]
