"""Lock on the GPUs of this host, for workers of `pytest -n` and nightly runs."""

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
    """Hold the user's GPU lock; block until it is free. Do nothing if `needed` is False."""
    if not needed:
        yield
        return
    path = Path(tempfile.gettempdir()) / f"vllm-repro-gpus-{os.getuid()}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
