"""Patched source over an installed vLLM and over an image."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tests.fake_package import BEFORE, FILE, PATCH, PROGRAM, write_package
from vllm_repro.command.container import Mount
from vllm_repro.errors import InfraError, Unsupported
from vllm_repro.servers.docker_source import ImageSource, SourceFile
from vllm_repro.servers.lab import plugin_folder
from vllm_repro.servers.overlay import patch_image, patch_installed
from vllm_repro.servers.witness import PLUGIN, Patched, witness_env, witnessed

DIGEST = hashlib.sha256(b"ANSWER = 42\n").hexdigest()
INSIDE = "/opt/venv/lib/python3.12/site-packages/vllm/answer.py"
COMPILED = "/opt/venv/lib/python3.12/site-packages/vllm/__pycache__/answer.cpython-312.pyc"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a `vllm` whose package is in another folder, with compiled files that Python uses."""
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(write_package(tmp_path / "packages", stale=True)))
    script = tmp_path / "bin" / "vllm"
    script.parent.mkdir()
    script.write_text(f"#!{sys.executable}\n{PROGRAM}", encoding="utf-8")
    script.chmod(0o755)
    return script


def run(script: Path, **env: str) -> str:
    done = subprocess.run(
        [str(script)],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


def test_an_installed_vllm_runs_the_patch_and_stays_as_it_is(installed: Path) -> None:
    source = patch_installed(installed, [PATCH], print)

    assert source.digests == {FILE: DIGEST}
    log = run(installed, **source.env)
    assert "ANSWER 42" in log
    assert [one.sha256 for one in witnessed(log, source.digests, ready=True)] == [DIGEST]
    assert "ANSWER 7" in run(installed), "as it was, compiled file and all"


@pytest.mark.parametrize("compiled", [COMPILED, ""])
def test_an_image_gets_the_patch_and_hides_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: str
) -> None:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path))
    image = ImageSource("/extra", {FILE: SourceFile(INSIDE, BEFORE, compiled)})
    source = patch_image(image, [PATCH], print)
    witness, changed, *hidden = source.mounts
    assert witness == Mount(str(PLUGIN), "/opt/vllm-repro/witness", readonly=True)
    assert (changed.target, changed.readonly) == (INSIDE, True)
    assert Path(changed.source).read_text(encoding="utf-8") == "ANSWER = 42\n"
    assert hidden == ([Mount("/dev/null", COMPILED, readonly=True)] if compiled else [])
    assert source.env == {"PYTHONPATH": "/opt/vllm-repro/witness:/extra", "REPRO_PATCHED": FILE}
    assert source.digests == {FILE: DIGEST}


def test_an_image_that_lacks_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_REPRO_CACHE", str(tmp_path))
    with pytest.raises(Unsupported, match=r"it has no vllm/answer\.py"):
        patch_image(ImageSource("", {}), [PATCH], print)
    assert not (tmp_path / "patched").exists()


UNPATCHED = hashlib.sha256(BEFORE.encode()).hexdigest()
NEVER = "vllm/never.py"


def log_of(path: Path, program: str, *files: str) -> str:
    """Return both outputs of the program, with `path` and the plugin first on its search path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=env | witness_env(files, str(PLUGIN), str(path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("folder", "name"), [(PLUGIN, "vllm_repro_witness"), (plugin_folder(), "vllm_repro_lab")]
)
def test_vllm_finds_a_plugin_by_its_entry_point(folder: Path, name: str) -> None:
    points = [
        (point.name, point.value)
        for distribution in distributions(path=[str(folder)])
        for point in distribution.entry_points
        if point.group == "vllm.general_plugins"
    ]
    assert points == [(name, f"{name}:register")]


def test_it_never_raises_and_needs_the_standard_library_only() -> None:
    tree = ast.parse((PLUGIN / "vllm_repro_witness" / "__init__.py").read_text(encoding="utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Raise | ast.Assert)]
    named = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    named |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert {str(name).partition(".")[0] for name in named} <= sys.stdlib_module_names


def test_it_does_nothing_unless_it_is_asked(tmp_path: Path) -> None:
    assert log_of(write_package(tmp_path), PROGRAM) == "ANSWER 41\n"


def test_a_process_logs_what_it_finds_and_runs(tmp_path: Path) -> None:
    write_package(tmp_path)
    (tmp_path / NEVER).touch()
    log = log_of(tmp_path, PROGRAM, FILE, NEVER)
    changed = {FILE: UNPATCHED, NEVER: hashlib.sha256(b"").hexdigest()}
    assert set(witnessed(log, changed, ready=True)) == {
        Patched(file=file, sha256=digest) for file, digest in changed.items()
    }
    assert [line.split()[2] for line in log.splitlines() if FILE in line] == ["found", "imported"]
    assert [line.split()[2] for line in log.splitlines() if NEVER in line] == ["found"]
    before = log_of(tmp_path, f"import vllm.answer\n{PROGRAM}", FILE)
    assert [line.split()[2] for line in before.splitlines() if FILE in line] == [
        "found",
        "imported",
    ]


def test_a_patch_that_is_no_python_fails_as_without_a_witness(tmp_path: Path) -> None:
    (write_package(tmp_path) / FILE).write_text("ANSWER = = 42\n", encoding="utf-8")
    program = (
        f"import traceback\ntry:\n    exec({PROGRAM!r})\nexcept SyntaxError:\n   "
        " traceback.print_exc()"
    )
    log = log_of(tmp_path, program, FILE)
    assert "SyntaxError: invalid syntax" in log
    assert "vllm_repro_witness" not in log


def test_a_compiled_file_of_another_text_does_not_pass(tmp_path: Path) -> None:
    log = log_of(write_package(tmp_path, stale=True), PROGRAM, FILE)
    assert "ANSWER 7" in log, "Python runs the compiled file, so there is something to see through"
    with pytest.raises(
        InfraError, match=r"an outdated compiled file instead of the patched vllm/answer\.py"
    ):
        witnessed(log, {FILE: UNPATCHED}, ready=True)


def test_another_file_than_the_patched_one_does_not_pass(tmp_path: Path) -> None:
    log = log_of(write_package(tmp_path), PROGRAM, FILE)
    for ready in (True, False):
        with pytest.raises(InfraError, match=f"a file with sha256 {UNPATCHED[:12]}"):
            witnessed(log, {FILE: "0" * 64}, ready=ready)


def test_silence_is_no_proof_of_a_server_that_is_ready() -> None:
    assert witnessed("INFO: boot failed", {FILE: UNPATCHED}, ready=False) == ()
    with pytest.raises(InfraError, match="no process of the server reported") as refused:
        witnessed("Application startup complete.", {FILE: UNPATCHED}, ready=True)
    assert "VLLM_PLUGINS" in refused.value.hint
