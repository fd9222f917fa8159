"""Catalogue of scenarios.

They come from the package, from other installed packages, from the folders in
`$VLLM_REPRO_SCENARIOS`, and from named files.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from vllm_repro.errors import ScenarioError, UsageError
from vllm_repro.resources import scenario_folder
from vllm_repro.scenario.reader import load_file
from vllm_repro.scenario.scenario import Arm, Scenario, issue_name

FOLDERS = "VLLM_REPRO_SCENARIOS"
"""Variable with folders of more scenarios, separated by `:`. `--scenarios DIR` sets it."""
GROUP = "vllm_repro.scenarios"
"""Group of entry points by which an installed package adds its folder of scenarios."""


def scenario_files(folder: Path | None = None) -> list[Path]:
    """Return the scenario files of a folder, by default all known ones.

    Known are those of this package, of other installed packages (entry points of `GROUP`) and of
    the folders in `$VLLM_REPRO_SCENARIOS`. Leave out `_*.py` and `conftest*.py`. Raises
    `UsageError` if that variable names something that is no folder.
    """
    more = named_folders()
    if missing := next((path for path in more if not path.is_dir()), None):
        raise UsageError(
            f"{missing} is no folder of scenarios", hint=f"--scenarios and {FOLDERS} take folders"
        )
    folders = [folder] if folder else [scenario_folder(), *_installed(tuple(sys.path)), *more]
    paths = (path for parent in folders for path in sorted(parent.glob("*.py")))
    return [path for path in paths if not path.name.startswith(("_", "conftest"))]


def named_folders() -> list[Path]:
    """Return the folders of scenarios that `$VLLM_REPRO_SCENARIOS` names."""
    return [Path(name) for name in os.environ.get(FOLDERS, "").split(os.pathsep) if name]


def folder_words() -> list[str]:
    """Return `--scenarios FOLDER` for each folder in `$VLLM_REPRO_SCENARIOS`.

    They are absolute, for a command that runs in another working directory.
    """
    return [word for folder in named_folders() for word in ("--scenarios", str(folder.absolute()))]


@cache
def _installed(_search: tuple[str, ...]) -> list[Path]:
    """Return the folders of scenarios that other packages name by an entry point of `GROUP`.

    Only the parent of a subpackage is imported. Cached for each `sys.path` (`_search`): reading a
    hundred packages takes 15 ms.
    """
    folders: list[Path] = []
    for entry in entry_points(group=GROUP):
        with contextlib.suppress(ImportError):  # the parent package of a stale entry point is gone
            if spec := importlib.util.find_spec(entry.module):
                folders += map(Path, spec.submodule_search_locations or ())
    return folders


def scenario_files_below(folder: Path) -> list[Path]:
    """Return the scenario files of a folder, else those of the `scenarios` folders below it.

    In the folder itself only files that use the vocabulary count. Without one, return those of its
    folder `scenarios`, or if it has no such folder, those of every `*/scenarios`.
    """
    scenarios = [
        path for path in scenario_files(folder) if b"vllm_repro.vocabulary" in path.read_bytes()
    ]
    below = (subfolder for subfolder in sorted(folder.glob("*/scenarios")) if subfolder.is_dir())
    if not scenarios and (folder / "scenarios").is_dir():
        return scenario_files(folder / "scenarios")
    return scenarios or [path for subfolder in below for path in scenario_files(subfolder)]


def all_scenarios(
    folder: Path | None = None, *, warn: Callable[[str], None] | None = None
) -> list[Scenario]:
    """Return every scenario of a folder, by default all known ones.

    Of two with the same id, return the last. A wrong file is left out, and `warn` gets the reason;
    without `warn` it raises `ScenarioError`.
    """
    scenarios: list[Scenario] = []
    for path in scenario_ids(folder).values():
        try:
            scenarios.append(load_file(path))
        except ScenarioError as error:
            if warn is None:
                raise
            warn(f"left out: {error}")
    return scenarios


def to_stderr(text: str) -> None:
    """Print `text` to standard error, as a warning of the program `vllm-repro`."""
    print(f"vllm-repro: {text}", file=sys.stderr)


def find(name: str) -> Scenario:
    """Return a scenario by its id, the number or URL of its issue, or the path of its file.

    A path ends with `.py`. To find an issue all scenarios are read; wrong files are reported to
    standard error. Raises `UsageError` with similar names if none is found, or several have that
    issue. Raises `ScenarioError` if the file has a mistake.
    """
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise UsageError(
                f"no scenario file at {name}",
                hint="vllm-repro list shows the scenarios of the package",
            )
        return load_file(path)
    files = scenario_ids()
    if name in files:
        return load_file(files[name])
    issue = issue_name(name).removeprefix("#")
    by_issue = [
        scenario
        for scenario in all_scenarios(warn=to_stderr)
        if issue in (scenario.issue, scenario.issue.partition("#")[2])
    ]
    if len(by_issue) == 1:
        return by_issue[0]
    near = (
        [scenario.id for scenario in by_issue]
        or [known for known in files if known.startswith(name)]
        or difflib.get_close_matches(name, files, n=3, cutoff=0.4)
    )
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(
        f"{len(by_issue)} scenarios have the issue {name}"
        if by_issue
        else f"no scenario is named {name!r}",
        hint=f"{meant}There are: {', '.join(files)}",
    )


def scenario_ids(folder: Path | None = None) -> dict[str, Path]:
    """Return the file of each scenario by its id, without reading the files.

    Of two files with one id, the last of `scenario_files` counts.
    """
    return {path.stem.replace("_", "-"): path for path in scenario_files(folder)}


def find_arms(scenario: Scenario, names: list[str] | None) -> list[Arm]:
    """Return the named arms in the scenario's order; all of them for `all` or without names.

    Raises `UsageError` for an unknown name.
    """
    known = [arm.name for arm in scenario.arms]
    if names and "all" in names:
        return list(scenario.arms)
    for name in names or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise UsageError(
                f"{scenario.id} has no arm {name!r}", hint=f"{meant}It has: {', '.join(known)}"
            )
    return [arm for arm in scenario.arms if not names or arm.name in names]
