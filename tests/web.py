"""The HTTP library of the tests and benchmarks, imported here alone."""

from __future__ import annotations

import httpx

__all__ = ["httpx"]
