"""The program with what the harness adds: reports of patched files, and counters in vLLM's source.

Both see imports, so they are registered before vLLM is imported.
"""

from __future__ import annotations

from . import probe
from .serve import serve


def _prepare() -> None:
    """Report patched files once they are imported, and count in the files of REPRO_PROBE."""
    from vllm_repro_witness import register  # type: ignore[import-not-found]  # in PYTHONPATH

    probe.register()
    register()  # it sees imports first, and leaves them to the probe


if __name__ == "__main__":
    serve(_prepare, probe.take_counts)
