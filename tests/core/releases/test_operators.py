"""Calls of compiled operators against the schemas in the compiled parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_repro.releases.operators import Fit, Misfit, compare, schemas_of

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
