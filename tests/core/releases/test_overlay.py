"""Overlay of a package: the patched file, and links to the others."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_package import FILE, PATCH, write_package
from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.releases.overlay import make_overlay
from vllm_repro.scenario.patch import Patch


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Return a folder with a package whose unchecked compiled files differ from its source."""
    return write_package(tmp_path / "packages", stale=True)


def answer(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "import vllm.answer as found; print(found.ANSWER, found.__file__)"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_an_overlay_is_imported_and_its_package_unchanged(tmp_path: Path, packages: Path) -> None:
    made = make_overlay(tmp_path, packages, [PATCH], print)
    assert made.folder.parent == tmp_path / "patched"
    assert answer(made.folder) == f"42 {made.folder / FILE}\n"
    assert answer(packages).startswith("7 ")
    assert made.digests == {FILE: hashlib.sha256(b"ANSWER = 42\n").hexdigest()}
    twice = make_overlay(tmp_path, packages, [PATCH, Patch(FILE, "42", "6 * 9")], print)
    assert answer(twice.folder).startswith("54 ")


def test_an_overlay_is_made_once_for_the_same_files(tmp_path: Path, packages: Path) -> None:
    first = make_overlay(tmp_path, packages, [PATCH], print)
    before = (first.folder / FILE).stat().st_mtime_ns
    assert make_overlay(tmp_path, packages, [PATCH], print) == first
    assert (first.folder / FILE).stat().st_mtime_ns == before
    other = make_overlay(tmp_path, packages, [Patch(FILE, "ANSWER = 41", "ANSWER = 43")], print)
    (packages / "vllm" / "new.py").touch()
    newer = make_overlay(tmp_path, packages, [PATCH], print)
    assert len({first.folder, other.folder, newer.folder}) == 3
    assert (newer.folder / "vllm" / "new.py").exists()


MAKER = """
import sys
from pathlib import Path
from vllm_repro.releases.overlay import make_overlay
from vllm_repro.scenario.patch import Patch
for number in sys.argv[3:]:
    patch = Patch("vllm/answer.py", "ANSWER = 41", f"ANSWER = {number}")
    print(make_overlay(Path(sys.argv[1]), Path(sys.argv[2]), [patch], str).folder.name, flush=True)
sys.stdin.read()
"""


def test_the_overlays_used_last_are_kept_and_those_in_use(tmp_path: Path, packages: Path) -> None:
    def maker(first: int, count: int) -> tuple[subprocess.Popen[str], list[str]]:
        words = [sys.executable, "-c", MAKER, f"{tmp_path}", f"{packages}"]
        words += map(str, range(first, first + count))
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        return process, [process.stdout.readline().strip() for _ in range(count)]

    def kept() -> set[str]:
        return {folder.name for folder in (tmp_path / "patched").iterdir()}

    process, old = maker(100, 10)
    assert kept() == set(old)  # all are in use
    other, (new, *_) = maker(200, 1)
    assert kept() == {*old, new}
    for one in (process, other):
        one.communicate()
    again, _ = maker(100, 1)  # the oldest is used again
    last, (newest, *_) = maker(300, 1)
    assert kept() == {*old[5:], new, newest, old[0]}
    for one in (again, last):
        one.communicate()


def test_an_interrupted_overlay_is_made_again(tmp_path: Path, packages: Path) -> None:
    first = make_overlay(tmp_path, packages, [PATCH], print)
    (first.folder / "complete").unlink()
    (first.folder / FILE).unlink()
    assert make_overlay(tmp_path, packages, [PATCH], print) == first
    assert answer(first.folder).startswith("42 ")


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (Patch("vllm/absent.py", "a", "b"), "it has no vllm/absent.py"),
        (Patch(FILE, "QUESTION", "b"), "nowhere"),
    ],
)
def test_a_patch_that_does_not_fit_leaves_nothing(
    tmp_path: Path, packages: Path, patch: Patch, message: str
) -> None:
    with pytest.raises(Unsupported, match=message):
        make_overlay(tmp_path, packages, [PATCH, patch], print)
    assert not (tmp_path / "patched").exists()


def test_an_overlay_that_cannot_be_written(tmp_path: Path, packages: Path) -> None:
    (tmp_path / "patched").touch()
    with pytest.raises(InfraError, match="cannot make a patched vLLM"):
        make_overlay(tmp_path, packages, [PATCH], print)
