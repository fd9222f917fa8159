"""The repository that `fixtures/history/make.py` makes, from small trees."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.core.releases.test_sources import git
from vllm_repro_search.bisect.candidates import commits_between

MAKE = Path(__file__).parents[2] / "fixtures" / "history" / "make.py"
FILE = "vllm/v1/attention/x.py"
MODELS = "vllm/model_executor/models/"
SPACE = "\n\n\n\n\n\n\n\n"
# so that a function's first line and its body are hunks apart
DOCSTRING = f'        """Free.{SPACE}        """\n'
CORE = "from vllm.utils.mathematics import cdiv\n\nclass EngineCore:\n    pass\n"
OLD = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "written by the build\n",
    "vllm/v1/engine/core.py": CORE,
    "vllm/utils/mathematics.py": "\ndef cdiv(a, b):\n    return -(a // -b)\n",
    FILE: (
        f"import a\n{SPACE}class A:\n    @a\n    def f(self, front):\n{DOCSTRING}        return"
        f" front\n{SPACE}last = 1\n"
    ),
    **{f"{MODELS}m{number}.py": "old\n" for number in range(30)},
    f"{MODELS}gone.py": "old\n",
}
NEW = OLD | {
    "vllm/v1/engine/core.py": f"{CORE}# new\n",
    FILE: (
        f"import a\nimport round_up\n{SPACE}class A:\n    @a\n    def f(self):\n{DOCSTRING}       "
        f" return reserve()\n\n    def g(self):\n        return 1\n{SPACE}last = 2\n"
    ),
    **{f"{MODELS}m{number}.py": "new\n" for number in range(30)},
}
NEW = {name: text for name, text in NEW.items() if name != f"{MODELS}gone.py"}


def made(tmp_path: Path, *words: str) -> tuple[Path, list[dict[str, str]]]:
    for release, tree in (("0.23.0", OLD), ("0.24.0", NEW)):
        for name, text in tree.items():
            path = tmp_path / "releases" / release / "lib" / "python3.11" / "site-packages" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    options = [
        "--old",
        "0.23.0",
        "--new",
        "0.24.0",
        "--apart",
        FILE,
        "--text",
        "reserve()",
        "--commits",
        "30",
    ]
    command: list[str | Path] = [
        sys.executable,
        MAKE,
        tmp_path / "made",
        *options,
        "--breaks",
        "2",
        *words,
        "--releases",
    ]
    done = subprocess.run(
        [*command, tmp_path / "releases"], check=True, capture_output=True, text=True
    )
    return tmp_path / "made", json.loads(done.stdout)


def having(folder: Path, text: str, commits: Iterable[str]) -> set[str]:
    """Return the commits that have a text in the file, by one process of git for all."""
    return set(re.findall(r"(?m)^\w+", git(folder, "grep", "-Fl", text, *commits, "--", FILE)))


@pytest.mark.parametrize(
    ("words", "kind"),
    [([], "wanted"), (["--branches"], "wanted"), (["--branches", "--picked"], "picked wanted")],
)
def test_tags_are_releases_and_one_commit_has_the_change(
    tmp_path: Path, words: list[str], kind: str
) -> None:
    folder, truth = made(tmp_path, *words)
    for tag, tree in (("v0.23.0", OLD), ("v0.24.0", NEW)):
        names = set(git(folder, "ls-tree", "-r", "--name-only", tag).split()) - {"vllm/NOTES"}
        assert names == tree.keys() - {"vllm/_version.py"}
        git(folder, "worktree", "add", "-q", "--detach", str(tmp_path / tag), tag)
        assert all((tmp_path / tag / name).read_text() == tree[name] for name in names)
    branches = "--branches" in words
    assert (
        git(folder, "merge-base", "v0.23.0", "v0.24.0") == git(folder, "rev-parse", "v0.23.0")
    ) is not branches
    commits, _ = commits_between(folder, "0.23.0", "0.24.0")
    hashes = [commit.source.rpartition("@")[2] for commit in commits]
    assert len(hashes) >= 34
    (wanted,) = (one["commit"] for one in truth if one["kind"] == kind)
    changed = {*hashes[hashes.index(wanted) :]}
    assert having(folder, "reserve()", hashes) == changed < having(folder, "last = 2", hashes)
    assert [one["kind"] for one in truth].count("broken") == 2


def test_the_whole_function_changes_in_one_commit(tmp_path: Path) -> None:
    folder, truth = made(tmp_path)
    (wanted,) = (number for number, one in enumerate(truth) if one["kind"] == "wanted")
    before, after = (
        git(folder, "show", f"{one['commit']}:{FILE}") for one in truth[wanted - 1 : wanted + 1]
    )
    assert after == NEW[FILE].strip()
    assert before == after.replace("f(self)", "f(self, front)").replace("reserve()", "front")


def test_a_change_may_come_in_parts_in_the_order_of_the_options(tmp_path: Path) -> None:
    folder, truth = made(tmp_path, "--text", "def g", "--text", "round_up")
    (wanted,) = (number for number, one in enumerate(truth) if one["kind"] == "wanted")
    assert [one["kind"] for one in truth[wanted - 4 : wanted + 1]] == [
        "part",
        "leaf",
        "part",
        "leaf",
        "wanted",
    ]
    commits = [one["commit"] for one in truth]
    for text, place in (
        ("reserve()", wanted - 4),
        ("def g", wanted - 2),
        ("import round_up", wanted),
    ):
        assert having(folder, text, commits) == {*commits[place:]}, text


def test_the_hashes_follow_from_the_options(tmp_path: Path) -> None:
    assert made(tmp_path / "a")[1] == made(tmp_path / "b")[1]
    assert made(tmp_path / "c", "--seed", "2")[1] != made(tmp_path / "d")[1]
