"""Patched functions that do not run in the lab."""

from __future__ import annotations

import pytest

from vllm_repro.servers.lab import untried
from vllm_repro_lab.record import Part

PARTS = (
    Part("vllm.a", "kernel", "w", "e"),
    Part("vllm.a", "Copy.init"),
    Part("vllm.a", "wrapped", "w", "e", runs=True),
)
SOURCE = """
@jit
def kernel():
    return 1
class Copy:
    def init(self):
        return 1
    def other(self):
        return 1
def wrapped():
    return 1
"""


@pytest.mark.parametrize(
    ("was", "now", "names"),
    [
        ("def kernel():\n    return 1", "def kernel():\n    return 2", ("kernel",)),
        ("@jit\n", "", ("kernel",)),
        ("def init(self):\n        return 1", "def init(self):\n        return 2", ("Copy.init",)),
        ("def other(self):\n        return 1", "def other(self):\n        return 2", ()),
        ("def wrapped():\n    return 1", "def wrapped():\n    return 2", ()),
        ("def kernel():\n", "def kernel():  # a comment\n", ()),
        ("@jit\n", "@jit\n@jit(\n", ("kernel", "Copy.init")),
    ],
)
def test_only_what_differs_and_does_not_run(was: str, now: str, names: tuple[str, ...]) -> None:
    assert SOURCE.count(was) == 1
    assert untried(PARTS, "vllm/a.py", SOURCE, SOURCE.replace(was, now)) == names


def test_another_file_has_no_parts() -> None:
    assert untried(PARTS, "vllm/b.py", SOURCE, SOURCE.replace("1", "2")) == ()
