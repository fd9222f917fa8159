"""The README's ways to install, as they are printed, each in an environment of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.live.inputs import ROOT

pytestmark = [pytest.mark.live, pytest.mark.depends("install")]

LINES = re.findall(r"^    ((?:pip|pipx|uvx) .*)$", (ROOT / "README.md").read_text("utf-8"), re.M)


def test_the_readme_has_lines_to_try() -> None:
    assert [line.partition(" ")[0] for line in LINES] == ["pip", "pipx", "uvx"]


@pytest.mark.parametrize("line", LINES)
def test_an_install_line_gives_the_command_with_all_scenarios(line: str, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", ROOT, checkout], check=True)
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True, symlinks=True)
    tool, *_ = line.split()
    places = [environment / "bin", tmp_path / "bin", Path(sys.prefix) / "bin"]  # the last has uvx
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    clean |= {
        "PATH": ":".join(
            map(str, [*places[:2], *places[2:] * (tool == "uvx"), "/usr/bin", "/bin"])
        ),
        "PIPX_HOME": str(tmp_path / "pipx"),
        "PIPX_BIN_DIR": str(tmp_path / "bin"),
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "UV_CONSTRAINT": str(ROOT / "constraints.txt"),
    }

    def call(words: str) -> str:
        done = subprocess.run(
            words, shell=True, cwd=checkout, env=clean, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    if tool == "pipx":
        call("pip install --quiet pipx")
    printed = call(line)
    if tool != "uvx":
        printed = call("vllm-repro list")
    ids = {path.stem.replace("_", "-") for path in (ROOT / "scenarios").glob("[a-z]*.py")}
    assert {name for name in ids if name in printed} == ids
