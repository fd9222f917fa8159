"""Golden files: reviewed output. `UPDATE_GOLDEN=1 pytest …` rewrites them."""

from __future__ import annotations

import os
from collections.abc import Container
from pathlib import Path

from tests.conftest import Done

TESTS = Path(__file__).parent


def assert_golden(name: str, text: str, feature: str = "") -> None:
    """Compare `text` with a golden file; CI never rewrites it.

    feature: folder of tests that has it.
    """
    path = TESTS / feature / "golden" / name
    if os.environ.get("UPDATE_GOLDEN") and not os.environ.get("CI"):
        path.write_text(text, encoding="utf-8")
    assert path.is_file(), f"no golden file {name}: UPDATE_GOLDEN=1 makes it"
    assert text == path.read_text(encoding="utf-8")


def missing(text: Container[str], *parts: str) -> list[str]:
    """Return the parts that `text` does not contain."""
    return [part for part in parts if part not in text]


def assert_refused(done: Done, *parts: str, status: int = 64) -> None:
    """Check that a command ended with `status`, and that its errors contain the parts."""
    assert (done.status, missing(done.err, *parts)) == (status, []), done.err
