"""The option `--vllm`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vllm_repro.errors import UsageError

if TYPE_CHECKING:
    from vllm_repro.releases.sources import Source


def source(text: str) -> Source:
    """Return the vLLM that the text of `--vllm` names: a release, wheel, folder or commit.

    Raises `argparse.ArgumentTypeError` for any other text.
    """
    # here: only a command with a SOURCE needs it
    from vllm_repro.releases.sources import parse_source

    try:
        return parse_source(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(f"{error.with_hint}") from None
