"""Options and last lines that `bisect` and `threshold` share: limits, resume, the text to paste."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from vllm_repro.cli.common import duration, number, print_json
from vllm_repro.cli.options import resumed
from vllm_repro.errors import INTERRUPTED
from vllm_repro.report.bisection import Bisection
from vllm_repro.report.threshold import Threshold
from vllm_repro.running.resume import UnfinishedBisection, UnfinishedThreshold

__all__ = ["add_limits", "add_resume", "continued", "finish", "stream_of"]


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add `--max-boots` and `--max-time`."""
    parser.add_argument("--max-boots", type=_boots, metavar="N", help="stop after so many boots, with what is known")
    parser.add_argument(
        "--max-time", type=duration, metavar="TIME", help="start no boot after this time: 90s, 30m or 2h"
    )


def add_resume(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--resume`."""
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help=f"continue the {what} in this folder with its options: --max-boots and --max-time may be given anew",
    )


def continued(
    arguments: argparse.Namespace, unfinished: UnfinishedBisection | UnfinishedThreshold | None
) -> argparse.Namespace:
    """Return the arguments of the first call with the limits of this one. Raises `UsageError`."""
    if unfinished is None:
        return arguments
    limits = {name: getattr(arguments, name) for name in ("max_boots", "max_time")}
    arguments = resumed(arguments, unfinished, beside=limits)
    vars(arguments).update(limits)
    return arguments


def stream_of(arguments: argparse.Namespace) -> TextIO:
    """Return where text goes: with `--json` the standard output holds JSON alone."""
    return sys.stderr if arguments.json else sys.stdout


def finish(
    arguments: argparse.Namespace, found: Bisection | Threshold, page: Path, text: str, record: Mapping[str, Any]
) -> int:
    """Print the text to paste, where it is, and how to resume; return the exit status. page: in `<scenario>/<verb>/<id>/`."""
    stream = stream_of(arguments)
    print(f"\n{text}", file=stream)
    print(f"this text: {page}", file=stream)
    if found.stopped:
        print(f"resume:    vllm-repro {page.parent.parent.name} --resume {shlex.quote(str(page.parent))}", file=stream)
    if arguments.json:
        print_json(record)
    return INTERRUPTED if found.stopped and found.stopped.startswith("SIG") else found.exit_status


def _boots(text: str) -> int:
    return number(text, least=1, most=1_000, what="number of boots")
