"""Patched source over an installed vLLM and over an image."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_package import BEFORE, FILE, PATCH, PROGRAM, write_package
from vllm_repro.command.container import Mount
from vllm_repro.errors import Unsupported
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
        [str(script)],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


def test_an_installed_vllm_runs_the_patch_and_stays_as_it_is(installed: Path) -> None:
    source = patch_installed(installed, [PATCH], print)

    assert source.digests == {FILE: DIGEST}
    log = run(installed, **source.env)
    assert "ANSWER 42" in log
    assert [one.sha256 for one in witnessed(log, source.digests, ready=True)] == [DIGEST]
    assert "ANSWER 7" in run(installed), "as it was, compiled file and all"


@pytest.mark.parametrize("compiled", [COMPILED, ""])
def test_an_image_gets_the_patch_and_hides_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: str
) -> None:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path))
    image = ImageSource("/extra", {FILE: SourceFile(INSIDE, BEFORE, compiled)})
    source = patch_image(image, [PATCH], print)
    witness, changed, *hidden = source.mounts
    assert witness == Mount(str(PLUGIN), "/opt/vllm-repro/witness", readonly=True)
    assert (changed.target, changed.readonly) == (INSIDE, True)
    assert Path(changed.source).read_text(encoding="utf-8") == "ANSWER = 42\n"
    assert hidden == ([Mount("/dev/null", COMPILED, readonly=True)] if compiled else [])
    assert source.env == {"PYTHONPATH": "/opt/vllm-repro/witness:/extra", "REPRO_PATCHED": FILE}
    assert source.digests == {FILE: DIGEST}


def test_an_image_that_lacks_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path))
    with pytest.raises(Unsupported, match=r"it has no vllm/answer\.py"):
        patch_image(ImageSource("", {}), [PATCH], print)
    assert not (tmp_path / "patched").exists()
