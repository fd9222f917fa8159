"""One release from the cache: installed once, runnable from anywhere, and a broken install leaves nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.releases.fake_installer import FakeInstaller, silent
from vllm_repro.errors import InfraError, UsageError
from vllm_repro.releases.footprint import base_size, further_set_size, release_size, set_size
from vllm_repro.releases.provision import ReleaseCache, cache_root


def tree(root: Path) -> set[str]:
    """What is under the cache, two levels deep, without the lock."""
    return {str(path.relative_to(root)) for path in [*root.glob("*"), *root.glob("*/*")]} - {"lock"}


def test_a_release_is_installed_once_and_runs_from_anywhere(
    cache: ReleaseCache, installer: FakeInstaller, tmp_path: Path
) -> None:
    said: list[str] = []
    first = release_size() + set_size("2.13.0") + base_size("2.13.0")
    assert cache.get("0.28.0") is None
    ready = cache.provision("v0.28.0", said.append)
    assert said[0] == f"vLLM 0.28.0 is not in the cache: installing {first} into {cache.root}"
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
