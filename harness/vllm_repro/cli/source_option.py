"""The options `--vllm` and `--with`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_repro.errors import UsageError

if TYPE_CHECKING:
    from vllm_repro.releases.sources import Source

WITH_OPTION: dict[str, Any] = {
    "action": "append",
    "metavar": "PACKAGE",
    "help": (
        "exchange or add a package of the vLLM that --vllm names, with what it needs and that vLLM"
        " lacks: NAME==VERSION, a wheel file, or a folder to build; may be given again"
    ),
}
"""Arguments of the option `--with`."""


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


def exchanged(vllm: Source | None, packages: Sequence[str] | None) -> Source:
    """Return the vLLM of `--vllm` with the packages of `--with`, if there are any.

    Raises `UsageError` without a vLLM, and for a text that names no package.
    """
    # here: only a command with a SOURCE needs it
    from vllm_repro.releases.sources import WITH, parse_source

    if vllm is None:
        raise UsageError(
            "--with exchanges packages of the vLLM that --vllm names", hint="add --vllm RELEASE"
        )
    return parse_source(WITH.join((f"{vllm}", *packages))) if packages else vllm
