"""The files that the result of a live test depends on, and their hash.

What is left out starts after a run's end (reports, nights), reads other texts (intake), or is the
verb of another command. A new file counts until it is named here. Comments and
docstrings do not count.
"""

from __future__ import annotations

import ast
import platform
import re
import sys
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
HARNESS = ROOT / "harness"

AFTER_A_RUN = ("vllm_repro/report", "vllm_repro_nights", "vllm_repro_intake")
RUN_VERB = ("__init__.py", "common.py", "options.py", "run.py")
"""Modules of `cli/` that `run` needs."""

NOT_FOR = {
    "boot": ("vllm_repro_explore", "vllm_repro_search", "vllm_repro_cluster", "vllm_repro_suite"),
    "search": ("vllm_repro/running", "vllm_repro/client"),
    "both": (),
    "install": tuple(path.name for path in sorted(HARNESS.glob("vllm_repro*"))),
}
"""Folders that no boot, EngineCore search, test of both, or installation depends on."""


@cache
def digest(subject: str) -> str:
    """Return the hash of the inputs of a subject, one of `NOT_FOR`, on this kind of machine."""
    hashed = sha256(f"{platform.machine()} {sys.version_info[:2]}".encode())
    for path in files(subject):
        hashed.update(f"\n{path.relative_to(ROOT)} ".encode())
        hashed.update(sha256(meaning(path)).digest())
    return hashed.hexdigest()


def meaning(path: Path) -> bytes:
    """Return a file's bytes; of Python its syntax tree, without comments and lone strings."""
    if path.suffix != ".py":
        return path.read_bytes()
    tree = ast.parse(path.read_bytes())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            body[:] = [line for line in body if not _is_text(line)]
    return ast.dump(tree).encode()


def _is_text(line: ast.AST) -> bool:
    if not isinstance(line, ast.Expr) or not isinstance(line.value, ast.Constant):
        return False
    return isinstance(line.value.value, str)


def files(subject: str) -> Iterator[Path]:
    """Yield the files of the harness that a subject depends on, in a fixed order."""
    left_out = [HARNESS / name for name in (*AFTER_A_RUN, *NOT_FOR[subject])]
    verbs = HARNESS / "vllm_repro" / "cli"
    yield ROOT / "constraints.txt"
    for path in sorted(HARNESS.rglob("*")):
        generated = re.search(r"/(\.|__pycache__)|\.egg-info", f"{path.relative_to(ROOT)}")
        if not path.is_file() or generated or any(path.is_relative_to(name) for name in left_out):
            continue
        if path.parent != verbs or path.name in RUN_VERB:
            yield path


def inputs_of_test(module: Path, subject: str) -> str:
    """Return the hash of a live test's inputs: its module, its helpers, the scenarios."""
    hashed = sha256(digest(subject).encode())
    helpers = [path for path in module.parent.glob("*.py") if not path.name.startswith("test_")]
    shared = [ROOT / "tests" / "conftest.py", ROOT / "pyproject.toml"]
    for path in sorted([module, *shared, *helpers]):
        hashed.update(meaning(path))
    patches = ROOT / "fixtures" / "patches"
    for path in sorted([*(ROOT / "scenarios").glob("*.py"), *patches.rglob("*.diff")]):
        hashed.update(meaning(path))
    return hashed.hexdigest()
