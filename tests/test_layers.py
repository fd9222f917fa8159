"""The import rules: folders of the core in order, no feature named by the core, no circles."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import vllm_repro

pytestmark = pytest.mark.features

HARNESS = Path(vllm_repro.__file__).parents[1]
TOP = HARNESS.parent

LAYERS = (
    "errors",
    "secret_names",
    "resources",
    "features",
    "tiny_model",
    "conversion",
    "command",
    "trigger",
    "verdict",
    "scenario",
    "vocabulary",
    "client",
    "host",
    "journal",
    "releases",
    "servers",
    "report",
    "running",
    "api",
    "cli",
    "__main__",
)
"""Folders and top-level modules of the core, lowest first.

`servers/witness/plugin` runs elsewhere.
"""

BELOW_THE_CORE = {"vllm_repro_diagnosis", "vllm_repro_lab"}
FEATURES = {
    f"vllm_repro_{name}" for name in ("cluster", "explore", "intake", "nights", "search", "suite")
}
MAY_IMPORT = {"vllm_repro_nights": {"vllm_repro_search"}}
"""Features that a feature imports."""

MIXED = ("tests/live", "benchmarks")
"""Folders of which a file goes with each feature that it imports (`tests.features`)."""

MOST_FOR_CHECK = 60
"""Modules that `check` reaches."""


@cache
def modules() -> dict[str, Path]:
    """Return the modules by dotted name, without those that run in another process."""
    found = {}
    for path in [
        *HARNESS.glob("vllm_repro/**/*.py"),
        *HARNESS.glob("vllm_repro_diagnosis/**/*.py"),
        *HARNESS.glob("vllm_repro_lab/parts*.py"),
        *(path for feature in FEATURES for path in HARNESS.glob(f"{feature}/**/*.py")),
    ]:
        if {"plugin", "program"} & set(path.parts):
            continue
        parts = path.relative_to(HARNESS).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(module: str) -> set[str]:
    """Return our modules that a module imports, also in functions and under TYPE_CHECKING."""
    names = imported_names(modules()[module])
    return {
        found
        for name in names
        if (found := name if name in modules() else name.rpartition(".")[0]) in modules()
    }


@cache
def imported_names(path: Path) -> set[str]:
    """Return all names that a file imports, with their modules."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def named(path: Path) -> Iterator[str]:
    """Yield our packages that a file names in strings, as for `importlib` and `python -m`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\bvllm_repro(?:_\w+)?\b", node.value)


def package(module: str) -> str:
    return module.partition(".")[0]


def layer(module: str) -> int:
    return LAYERS.index(module.split(".")[1])


def test_each_folder_imports_only_folders_below_it() -> None:
    core = [
        module for module in modules() if package(module) == "vllm_repro" and module != "vllm_repro"
    ]
    assert not {
        (module, name)
        for module in core
        for name in imports(module)
        if package(name) == "vllm_repro" and name != "vllm_repro" and layer(name) > layer(module)
    }


def test_nothing_imports_a_feature() -> None:
    assert not {
        (module, name)
        for module in modules()
        for name in imports(module)
        if package(name) in FEATURES - {package(module)} - MAY_IMPORT.get(package(module), set())
    }


def test_what_the_core_stands_on_imports_none_of_it() -> None:
    assert not {
        (module, name)
        for module in modules()
        if package(module) in BELOW_THE_CORE
        for name in imports(module)
        if package(name) != package(module)
    }


def test_no_string_of_the_core_names_a_feature() -> None:
    assert not {
        (module, name)
        for module, path in modules().items()
        if package(module) not in FEATURES
        for name in named(path)
        if name in FEATURES
    }


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter({module: imports(module) - {module} for module in modules()}).prepare()


def reached(module: str) -> set[str]:
    """Return a module and all that it imports, directly or not."""
    found: set[str] = set()
    todo = {module}
    while todo:
        name = todo.pop()
        found.add(name)
        todo |= imports(name) - found
    return found


def test_every_module_can_be_imported() -> None:
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", code, *sorted(modules())], check=True, timeout=120)


def test_check_reaches_few_modules() -> None:
    assert len(reached("vllm_repro.cli.check")) <= MOST_FOR_CHECK


def test_httpx_is_imported_in_one_folder_and_in_one_module_of_the_tests() -> None:
    importing = {
        path.relative_to(TOP).as_posix()
        for folder in ("harness", "tests", "fixtures", "scenarios")
        for path in (TOP / folder).rglob("*.py")
        if "httpx" in path.read_text(encoding="utf-8")
        and "httpx" in {name.partition(".")[0] for name in imported_names(path)}
    }
    client = "harness/vllm_repro/client"
    assert importing == {f"{client}/client.py", f"{client}/sdk.py", "tests/web.py"}


def test_every_package_is_named() -> None:
    """Else its imports are not looked at. A feature may have been deleted."""
    packages = {path.parent.name for path in HARNESS.glob("*/__init__.py")}
    assert packages <= {"vllm_repro", *BELOW_THE_CORE, *FEATURES}


FOLDERS = {feature.removeprefix("vllm_repro_"): feature for feature in FEATURES}
"""The feature of each folder of tests."""


def feature_of(name: str) -> str:
    """Return the feature of a dotted name, or its first part."""
    first = package(name.removeprefix("tests."))
    return FOLDERS.get(first, first)


def test_tests_need_no_other_feature() -> None:
    """Those of the core need none. A file of MIXED goes with each feature that it imports."""
    broken = set()
    for path in (
        *TOP.glob("tests/**/*.py"),
        *TOP.glob("fixtures/**/*.py"),
        *TOP.glob("scenarios/*.py"),
    ):
        name = path.relative_to(TOP)
        if name.is_relative_to(MIXED[0]):
            continue
        tested = FOLDERS.get(name.parts[1], "")
        others = set(map(feature_of, imported_names(path))) & FEATURES - {tested} - MAY_IMPORT.get(
            tested, set()
        )
        broken |= {(f"{name}", feature) for feature in others}
    assert broken == set()
