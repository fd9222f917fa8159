"""Delete a feature with its folders, and test what is left.

`python -m tests.features` deletes each feature in a copy of the checkout, and then all of them.
With --quick the last step leaves out the folders of tests that boot servers: what they import is
the same, as tests/test_layers.py shows.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.test_layers import FEATURES, MAY_IMPORT, MIXED

ROOT = Path(__file__).parents[1]

NOTICE = ("-m", "features", "tests/test_layers.py", "tests/core/cli", "tests/core/test_api.py")
"""Tests that run without each feature: imports of all that is left, and what reads entry points."""

ALL_OF_THE_CORE = (
    "-m",
    "not docker and not live and not browser",
    "tests/test_layers.py",
    "tests/core",
)
"""Tests that run without any feature."""

BOOTS = ("running", "servers", "client", "host")
"""Folders of tests/core that take most of the time."""


def with_importers(feature: str) -> set[str]:
    """Return a feature and the features that import it."""
    return {feature, *(name for name, needed in MAY_IMPORT.items() if feature in needed)}


def copy_checkout(target: Path) -> None:
    """Copy the files of the checkout as they are now, without those that git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().rstrip("\0").split("\0"):
        source = ROOT / name
        if source.exists():  # a file that was deleted and not committed is still listed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def delete(feature: str, root: Path) -> None:
    """Delete a feature: its package, its tests, and the files and lines that name it elsewhere."""
    tests = feature.removeprefix("vllm_repro_")
    shutil.rmtree(root / "harness" / feature)
    shutil.rmtree(root / "tests" / tests)
    imports = re.compile(rf"^ *(?:from|import) (?:{feature}|tests\.{tests})\b", re.MULTILINE)
    for path in (path for folder in MIXED for path in (root / folder).rglob("*.py")):
        if imports.search(path.read_text(encoding="utf-8")):
            path.unlink()
    for path in (root / "pyproject.toml", root / "harness/vllm_repro/__init__.pyi"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(line for line in lines if feature not in line), encoding="utf-8")


def make_environment(root: Path) -> Path:
    """Return an interpreter with the packages of this one, and the copy for the checkout."""
    folder = root / ".venv"
    venv.create(folder, symlinks=True)
    # A path file of a folder that a path file adds is not read, so the checkout stays out.
    paths = f"{root / 'harness'}\n{sysconfig.get_path('purelib')}\n"
    (next(folder.glob("lib/python*/site-packages")) / "copy.pth").write_text(
        paths, encoding="utf-8"
    )
    return folder / "bin" / "python"


def failure(features: set[str], tests: Sequence[str]) -> str:
    """Return what the tests print without these features if they fail, or an empty string."""
    with tempfile.TemporaryDirectory(prefix="vllm-repro-features-") as name:
        root = Path(name).resolve()
        copy_checkout(root)
        for feature in features:
            delete(feature, root)
        python = make_environment(root)
        # The installed package still names the plugin, also for a pytest that a test starts.
        blocked = {"PYTEST_ADDOPTS": "-p no:vllm_repro"} if "vllm_repro_suite" in features else {}
        words = ["-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *tests]
        done = subprocess.run(
            [python, *words],
            cwd=root,
            env=os.environ | blocked,
            check=False,
            capture_output=True,
            text=True,
        )
    return done.stdout + done.stderr if done.returncode else ""


def plan(names: Sequence[str], *, quick: bool) -> Iterator[tuple[set[str], Sequence[str]]]:
    """Yield which features to delete and which tests to run then.

    names: features; empty: each, and all. quick: leave out `BOOTS`.
    """
    left_out = [f"--ignore=tests/core/{folder}" for folder in BOOTS if quick]
    for feature in names or sorted(FEATURES):
        yield with_importers(feature), NOTICE
    if not names:
        yield set(FEATURES), (*ALL_OF_THE_CORE, *left_out)


def main(names: Sequence[str]) -> int:
    status = 0
    features_named = [name for name in names if name != "--quick"]
    for features, tests in plan(features_named, quick="--quick" in names):
        began = time.monotonic()
        problem = failure(features, tests)
        status = 1 if problem else status
        took = f"{time.monotonic() - began:.0f} s"
        print(
            f"without {', '.join(sorted(features))}: {'failed' if problem else 'passed'} ({took})",
            flush=True,
        )
        print(problem, end="")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
