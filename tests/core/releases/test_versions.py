"""Release numbers, and the requirements of a release."""

from __future__ import annotations

import platform

import pytest

from vllm_repro.errors import InfraError, UsageError
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
