"""`explore --vendor`: the folder, and its test file over a fake program."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.budgets import statements
from tests.explore.test_explore import DEATH
from vllm_repro.cli import main

MAY_IMPORT = {*sys.stdlib_module_names, "vllm", "pytest", "numba", "numpy", "torch", "triton"}
"""vLLM installs the last four itself."""
SERVE = f"""
import json, sys
print(json.dumps({{"version": "1"}}), flush=True)
for line in sys.stdin:
    long = any(ask["prompt"] > 40 for wave in json.loads(line)["waves"] for ask in wave)
    print(json.dumps({{"steps": 3, **({{"death": {DEATH}}} if long else {{}})}}), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert main(["explore", "--vendor", str(tmp_path / "tests" / "search")]) == 0
    return tmp_path / "tests" / "search"


def imported(path: Path) -> Iterator[str]:
    """Yield the files of the folder and the packages that a module imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1
            yield from [f"{node.module or alias.name}.py" for alias in node.names]


def test_the_folder_imports_vllm_and_itself_alone(folder: Path) -> None:
    files = {path.name: path for path in folder.glob("*.py")}
    assert {name for path in files.values() for name in imported(path)} <= MAY_IMPORT | set(files)
    texts = [path.read_text(encoding="utf-8") for path in files.values()]
    assert sum(map(statements, texts)) <= 3_500
    assert all(text.startswith("# SPDX-License-Identifier: Apache-2.0\n") for text in texts)
    (folder / "known.json").write_text("[1]", encoding="utf-8")
    assert main(["explore", "--vendor", str(folder)]) == 0
    assert (folder / "known.json").read_text(encoding="utf-8") == "[1]"


def test_no_other_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("mine", encoding="utf-8")
    for name in ("", ".", "README.md", "README.md/x"):
        assert main(["explore", "--vendor", name]) == 64
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "mine"


def output_of(folder: Path, **variables: str) -> str:
    """Run the folder's tests over the fake program; return their output."""
    (folder / "serve.py").write_text(SERVE, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder],
        cwd=folder.parent,
        env={"PATH": os.environ["PATH"], "SEARCH_JOBS": "2", **variables},
        capture_output=True,
        text=True,
        check=False,
    ).stdout


def test_a_finding_fails_with_its_smallest_case_until_it_is_listed(folder: Path) -> None:
    output = output_of(folder, SEARCH_SEEDS="2,4-20")
    assert "18 cases, 54 steps, 1 findings" in output
    assert "death: AssertionError in popleft_n (vllm/v1/core/kv_cache_utils.py): " in output
    assert '"waves": [[{"prompt": 41, "answer": 1' in output
    assert "no case was played" in output_of(folder, SEARCH_SECONDS="0")
    command = output.partition("again: env SEARCH_CASE=")[2].split()
    finding = json.loads(Path(command[0]).read_text(encoding="utf-8"))
    (folder / "known.json").write_text(json.dumps([finding]), encoding="utf-8")
    (folder / "cases").mkdir()
    (folder / "cases" / "kept.json").write_text(json.dumps(finding["case"]), encoding="utf-8")
    output = output_of(folder, SEARCH_SEEDS="2,4-20", SEARCH_CASE=command[0])
    assert "2 failed, 1 passed" in output
    assert "test_case[kept]" in output
    assert "popleft_n" in output
