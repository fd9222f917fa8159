"""What the verbs share: parsers with an example, and JSON on standard output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Function", "Subparsers", "print_json", "verb"]

# A string, because argparse's class can be subscripted by a type checker only.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

Function = Callable[[argparse.Namespace], int]


def verb(
    subparsers: Subparsers, name: str, function: Function, *, does: str, example: str, prints: str = "", more: str = ""
) -> argparse.ArgumentParser:
    """A subparser of the house: one sentence, an example and what comes after it (`more`), `-v`, and `--json` where there is data to print.

    prints: which data.
    """
    parser = subparsers.add_parser(
        name,
        help=does,
        description=does[0].upper() + does[1:] + ".",
        epilog=f"example:\n  {example}{more}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="say more; a fault of the harness shows its traceback"
    )
    if prints:
        parser.add_argument("--json", action="store_true", help=f"print JSON: {prints}")
    parser.set_defaults(function=function)
    return parser


def print_json(value: Any) -> None:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(json.dumps(value, indent=2, ensure_ascii=not encoding.lower().startswith("utf")))
