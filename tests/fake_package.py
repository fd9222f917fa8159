"""Package `vllm` of two files, and a program that loads plugins and imports it, as vLLM does."""

from __future__ import annotations

import py_compile
from pathlib import Path

from vllm_repro.releases.provision import Release
from vllm_repro.releases.sources import Source
from vllm_repro.scenario.patch import Patch

FILE = "vllm/answer.py"
BEFORE = "ANSWER = 41\n"
PATCH = Patch(FILE, "ANSWER = 41", "ANSWER = 42")

PROGRAM = """
import importlib.metadata, sys, time
for point in importlib.metadata.entry_points(group="vllm.general_plugins"):
    point.load()()
import vllm.answer
print("ANSWER", vllm.answer.ANSWER, flush=True)
"""


def write_package(folder: Path, *, stale: bool = False) -> Path:
    """Write the package into `folder`.

    stale: also write bytecode of another text that Python is told to trust.
    """
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").touch()
    (folder / FILE).write_text("ANSWER = 7\n" if stale else BEFORE, encoding="utf-8")
    if stale:
        py_compile.compile(
            str(folder / FILE), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH
        )
        (folder / FILE).write_text(BEFORE, encoding="utf-8")
    return folder


def fake_release(version: str, folder: Path) -> Release:
    """The record of a release in `folder`, where nothing is installed."""
    return Release(
        source=Source(release=version),
        version=version,
        torch="2.13.0",
        python=folder / "bin" / "python",
        packages=folder / "packages",
        executable=folder / "bin" / "vllm",
    )
