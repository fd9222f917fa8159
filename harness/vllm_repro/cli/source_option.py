"""The option `--vllm`."""

from __future__ import annotations

import argparse

from vllm_repro.errors import UsageError

__all__ = ["source"]


def source(text: str) -> str:
    """Return the full name of a SOURCE: `0.23.0` for `v0.23`, an absolute path, or one with the full hash of a commit."""
    from vllm_repro.releases.sources import named_source  # here: only a given SOURCE needs it

    try:
        return named_source(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(f"{error.with_hint}") from None
