"""Changed source laid over a vLLM that is installed here, and over an image: what a server is given, and what it then runs."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_package import BEFORE, FILE, PATCH, PROGRAM, write_package
from vllm_repro.command.container import Mount
from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.scenario.patch import Patch
from vllm_repro.servers.docker_source import ImageSource, SourceFile
from vllm_repro.servers.overlay import patch_image, patch_installed
from vllm_repro.servers.witness import PLUGIN, witnessed

DIGEST = hashlib.sha256(b"ANSWER = 42\n").hexdigest()
INSIDE = "/opt/venv/lib/python3.12/site-packages/vllm/answer.py"
COMPILED = "/opt/venv/lib/python3.12/site-packages/vllm/__pycache__/answer.cpython-312.pyc"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `vllm` whose package lies in a folder of packages; its compiled files are there, and taken unasked."""
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(write_package(tmp_path / "packages", stale=True)))
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\n{PROGRAM}", encoding="utf-8")
    script.chmod(0o755)
    return script


def run(script: Path, **env: str) -> str:
    done = subprocess.run(
        [str(script)], env=os.environ | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    return done.stdout


def test_an_installed_vllm_runs_the_changed_file_and_stays_as_it_is(installed: Path) -> None:
    laid = patch_installed(installed, [PATCH], print)

    assert laid.digests == {FILE: DIGEST}
    log = run(installed, **laid.env)
    assert "ANSWER 42" in log
    assert [one.sha256 for one in witnessed(log, laid.digests, ready=True)] == [DIGEST]
    assert "ANSWER 7" in run(installed), "as it was, compiled file and all"


def test_it_is_made_again_when_other_files_are_installed(installed: Path, tmp_path: Path) -> None:
    first = patch_installed(installed, [PATCH], print)
    assert patch_installed(installed, [PATCH], print) == first
    (tmp_path / "packages" / "vllm" / "new.py").touch()
    second = patch_installed(installed, [PATCH], print)
    assert second.env != first.env
    assert (Path(second.env["PYTHONPATH"].split(":")[0]) / "vllm" / "new.py").exists()


def test_a_patch_that_does_not_fit_what_is_installed(installed: Path) -> None:
    with pytest.raises(Unsupported, match=r"the text of the change nowhere; it begins with 'QUESTION'"):
        patch_installed(installed, [Patch(FILE, "QUESTION", "x")], print)


def test_a_vllm_that_does_not_say_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "vllm").write_text("#!/bin/sh\nexec elsewhere\n", encoding="utf-8")
    with pytest.raises(InfraError, match="its Python does not find a package vllm"):
        patch_installed(tmp_path / "vllm", [PATCH], print)


@pytest.mark.parametrize("compiled", [COMPILED, ""])
def test_an_image_gets_the_changed_file_mounted_and_its_compiled_one_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: str
) -> None:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path))
    source = ImageSource("/extra", {FILE: SourceFile(INSIDE, BEFORE, compiled)})
    laid = patch_image(source, [PATCH], print)
    witness, changed, *hidden = laid.mounts
    assert witness == Mount(str(PLUGIN), "/opt/vllm-repro/witness", readonly=True)
    assert (changed.target, changed.readonly) == (INSIDE, True)
    assert Path(changed.source).read_text(encoding="utf-8") == "ANSWER = 42\n"
    assert hidden == ([Mount("/dev/null", COMPILED, readonly=True)] if compiled else [])
    assert laid.env == {"PYTHONPATH": "/opt/vllm-repro/witness:/extra", "REPRO_PATCHED": FILE}
    assert laid.digests == {FILE: DIGEST}


def test_an_image_that_lacks_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path))
    with pytest.raises(Unsupported, match=r"it has no vllm/answer\.py"):
        patch_image(ImageSource("", {}), [PATCH], print)
    assert not (tmp_path / "patched").exists()
