"""Names that commits import and lack, compared with what Python itself does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.releases.test_sources import git
from vllm_repro.releases.sources import Source
from vllm_repro_search.bisect.imports import missing_names

ENDS = {"__init__": "", "a": "from vllm.b import x\n", "b": "x = 1\n"}


def commit(folder: Path, files: dict[str, str]) -> Source:
    git(folder, "rm", "-rfq", "--ignore-unmatch", ".")
    for name, text in files.items():
        path = folder / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(folder, "add", ".")
    git(folder, "commit", "-q", "--allow-empty", "-m", "a change")
    return Source(folder=folder, commit=git(folder, "rev-parse", "HEAD"))


def lacking(folder: Path, middle: dict[str, str], ends: dict[str, str]) -> tuple[set[str], str]:
    """Return the names of a commit between two others, and the last line of Python's error when it imports `vllm.a`."""
    git(folder, "init", "-q", "-b", "main")
    sources = [commit(folder, files) for files in (ends, middle)]
    done = subprocess.run(
        [sys.executable, "-B", "-c", "import vllm.a"], cwd=folder, capture_output=True, text=True, check=False
    )
    sources.append(commit(folder, ends))
    missing = missing_names(sources, {"vllm/__init__.py", "vllm/a.py"})
    assert not missing.keys() - {sources[1]}
    return set(missing.get(sources[1], ())), done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    ("files", "missing"),
    [
        ({"b": "y = 1\n"}, {"vllm.b.x"}),
        ({"b": "def f():\n    x = 1\n    global z\n"}, None),  # bound somewhere: it may be there
        ({"b": "from vllm.c import *\n", "c": "x = 1\n"}, set()),
        ({"b": "def __getattr__(name):\n    return 1\n"}, set()),
        ({"b": "class B:\n    def __getattr__(self, name):\n        return 1\n"}, {"vllm.b.x"}),
        ({"b": "globals()['x'] = 1\n"}, set()),
        ({"b": "try:\n    import os as x\nexcept ImportError:\n    x = None\n"}, set()),
        ({"b/__init__": "", "b/x": ""}, set()),
        ({"b/__init__": "", "b/y": ""}, {"vllm.b.x"}),
        ({"b/x": ""}, set()),
        ({}, {"vllm.b"}),
        ({"a": "from . import b, c\n", "b": ""}, {"vllm.c"}),
        ({"a": "from .b import y\n", "b": "x = 1\n"}, {"vllm.b.y"}),
        ({"a": "import vllm.c.d\n"}, {"vllm.c.d"}),
        ({"a": "class A:\n    from vllm.c import x\n"}, {"vllm.c"}),
        ({"a": "def f():\n    from vllm.c import x\n"}, set()),
        ({"a": "try:\n    from vllm.c import x\nexcept ImportError:\n    x = 1\n"}, set()),
        ({"a": "if False:\n    from vllm.c import x\n"}, set()),
        ({"a": "import os.path, json.decoder\n"}, set()),
        ({"a": "(\n"}, set()),
        ({"e": "from vllm.c import x\n", "b": "x = 1\n"}, set()),  # no server opened it
    ],
)
def test_a_name_that_is_found_missing_is_missing(
    tmp_path: Path, files: dict[str, str], missing: set[str] | None
) -> None:
    found, error = lacking(tmp_path, {"__init__": "", "a": ENDS["a"], **files}, ENDS)
    assert found == (missing or set())
    if missing:
        (name,) = missing
        assert "No module named 'vllm" in error or f"cannot import name '{name.rpartition('.')[2]}'" in error
    elif missing is not None and files.get("a") != "(\n":
        assert not error, error


def test_what_an_end_lacks_too_counts_nowhere(tmp_path: Path) -> None:
    compiled = {**ENDS, "a": "from vllm._C import ops\n"}
    assert lacking(tmp_path, {**compiled, "b": ""}, compiled)[0] == set()
