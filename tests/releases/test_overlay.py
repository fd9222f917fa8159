"""A release with changed files beside the release itself."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_repro.errors import Unsupported
from vllm_repro.releases.overlay import overlay
from vllm_repro.releases.provision import Provisioned
from vllm_repro.scenario.patch import Patch

FILE = "vllm/answer.py"
PATCH = Patch(FILE, "ANSWER = 41", "ANSWER = 42")


@pytest.fixture
def release(tmp_path: Path) -> Provisioned:
    """One as the cache has them: a package, a launcher, compiled files, a marker."""
    folder = tmp_path / "releases" / "0.1.0"
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text("from vllm.answer import ANSWER\n")
    (folder / FILE).write_text("ANSWER = 41\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "vllm").write_text("#!/bin/sh\n")
    (folder / "complete.json").write_text("{}")
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(folder)], check=True)
    return Provisioned("0.1.0", "2.0", Path(sys.executable), folder, (str(folder / "bin" / "vllm"),))


def answer(release: Provisioned) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "import vllm; print(vllm.ANSWER, vllm.__file__)"],
        env={**os.environ, "PYTHONPATH": str(release.pythonpath)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_the_changed_file_is_imported_and_the_release_stays_as_it_is(tmp_path: Path, release: Provisioned) -> None:
    made = overlay(tmp_path, release, [PATCH], print)
    assert answer(made.release).startswith(f"42 {made.release.pythonpath}")
    assert answer(release).startswith("41 ")
    assert made.digests == {FILE: hashlib.sha256(b"ANSWER = 42\n").hexdigest()}
    assert Path(made.release.argv_prefix[0]).is_file()
    assert made.release.pythonpath.parent == tmp_path / "patched"


def test_it_is_made_once_for_the_same_change(tmp_path: Path, release: Provisioned) -> None:
    first = overlay(tmp_path, release, [PATCH], print)
    before = (first.release.pythonpath / FILE).stat().st_mtime_ns
    assert overlay(tmp_path, release, [PATCH], print) == first
    assert (first.release.pythonpath / FILE).stat().st_mtime_ns == before
    other = overlay(tmp_path, release, [Patch(FILE, "ANSWER = 41", "ANSWER = 43")], print)
    assert other.release.pythonpath != first.release.pythonpath


def test_changes_of_one_file_add_up(tmp_path: Path, release: Provisioned) -> None:
    made = overlay(tmp_path, release, [PATCH, Patch(FILE, "42", "6 * 9")], print)
    assert answer(made.release).startswith("54 ")


@pytest.mark.parametrize(
    ("patch", "message"),
    [(Patch("vllm/absent.py", "a", "b"), "it has no vllm/absent.py"), (Patch(FILE, "QUESTION", "b"), "nowhere")],
)
def test_what_does_not_fit_leaves_nothing(tmp_path: Path, release: Provisioned, patch: Patch, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        overlay(tmp_path, release, [PATCH, patch], print)
    assert not (tmp_path / "patched").exists()
