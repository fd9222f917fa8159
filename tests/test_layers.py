"""The import rule: a folder imports only folders that stand before it in `LAYERS`, and no modules import each other in a circle."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import vllm_repro

HARNESS = Path(vllm_repro.__file__).parents[1]

LAYERS = (
    "vllm_repro_lab",
    "errors",
    "evidence",
    "secret_names",
    "resources",
    "tiny_model",
    "conversion",
    "command",
    "diagnosis",
    "trigger",
    "verdict",
    "scenario",
    "vocabulary",
    "client",
    "host",
    "journal",
    "releases",
    "intake",
    "servers",
    "report",
    "history",
    "running",
    "api",
    "frames",
    "cli",
    "pytest_plugin",
    "vllm_repro_explore",
    "__main__",
)
"""Folders and top-level modules, lowest first. `vllm_repro_explore/program` and `servers/witness/plugin` run elsewhere."""


def modules() -> dict[str, Path]:
    """Return the modules of both packages by dotted name, without those that run in another process."""
    found = {}
    for path in [
        *HARNESS.glob("vllm_repro/**/*.py"),
        *HARNESS.glob("vllm_repro_explore/*.py"),
        *HARNESS.glob("vllm_repro_lab/parts*.py"),
    ]:
        if "plugin" in path.parts:
            continue
        parts = path.relative_to(HARNESS).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def all_imports() -> dict[str, set[str]]:
    known = modules()
    return {module: imports(path, known) for module, path in known.items()}


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of ours that a file imports anywhere in it, also in functions and under TYPE_CHECKING."""
    return {name if name in known else name.rpartition(".")[0] for name in imported_names(path)} & known.keys()


def imported_names(path: Path) -> set[str]:
    """Return all names that a file imports, with their modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def layer(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == "vllm_repro" and len(parts) > 1 else parts[0]


def test_each_folder_imports_only_folders_below_it() -> None:
    broken = {
        (module.removeprefix("vllm_repro."), name.removeprefix("vllm_repro."))
        for module, names in all_imports().items()
        for name in names
        if name != "vllm_repro" and LAYERS.index(layer(name)) > LAYERS.index(layer(module))
    }
    assert not broken


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter({module: names - {module} for module, names in all_imports().items()}).prepare()


def test_httpx_is_imported_in_one_folder_and_in_one_module_of_the_tests() -> None:
    root = Path(__file__).parents[1]
    importing = {
        path.relative_to(root).as_posix()
        for folder in ("harness", "tests", "fixtures", "scenarios")
        for path in (root / folder).rglob("*.py")
        if "httpx" in {name.partition(".")[0] for name in imported_names(path)}
    }
    client = "harness/vllm_repro/client"
    assert importing == {f"{client}/client.py", f"{client}/sdk.py", "tests/web.py"}
