"""Skips that fail in CI, because CI installs everything that a test needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NoReturn

import pytest

__all__ = ["cannot_run"]


def cannot_run(why: str, environment: Mapping[str, str] = os.environ) -> NoReturn:
    """Skip the test, or fail it if CI=true."""
    if environment.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(f"CI promises what this test needs: {why}", pytrace=False)
    pytest.skip(why)  # never in CI: it has failed above
