"""Frames of a death in the lab, and programs with the lab's plugin on a release."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import Done
from vllm_repro.releases.provision import provision
from vllm_repro.releases.sources import Source
from vllm_repro.servers.lab import plugin_folder


def assert_of_release(done: Done, frames: Sequence[str], release: str) -> None:
    """Check that the release or torch defines each frame of a run that was booted here."""
    if not done.kept:
        assert strange_frames(frames, provision(Source(release=release)).packages) == []


def output_on_release(release: str, program: str, home: Path) -> str:
    """Return the output of a program of this folder with a release and the lab's plugin."""
    installed = provision(Source(release=release))
    search_path = f"{installed.packages}:{plugin_folder()}"
    interpreted = {"PYTHONPATH": search_path, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [str(installed.python), str(Path(__file__).with_name(program))],
        env={**interpreted, "PATH": "/usr/bin:/bin", "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def strange_frames(frames: Sequence[str], release: Path) -> list[str]:
    """Return the `file:function` frames that neither the release at `release` nor torch defines."""
    return [
        frame for frame in frames if not frame.startswith("torch/") and not _defined(frame, release)
    ]


def _defined(frame: str, release: Path) -> bool:
    file, _, function = frame.rpartition(":")
    path = release / file
    if not path.is_file():
        return False
    if function.startswith("<"):
        return True  # <genexpr>, <lambda>: Python's own names, which no file defines
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function
        for node in ast.walk(tree)
    )
