"""The GPUs of this host, for one at a time of those that ask here: workers of `pytest -n`, and nights."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["gpus_taken"]


@contextlib.contextmanager
def gpus_taken(*, needed: bool) -> Iterator[None]:
    """Waits until nobody else of this user has them. Does nothing where they are not needed."""
    if not needed:
        yield
        return
    path = Path(tempfile.gettempdir()) / f"vllm-repro-gpus-{os.getuid()}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
