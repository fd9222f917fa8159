"""`vllm-repro clean`: processes and containers that a killed run left."""

from __future__ import annotations

import argparse
import sys

from vllm_repro.cli.common import add_common
from vllm_repro.servers.orphans import end_orphans, find_orphans


def add(parser: argparse.ArgumentParser) -> None:
    add_common(parser, example="vllm-repro clean --yes")
    parser.add_argument("--yes", action="store_true", help="remove instead of listing")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also print why Docker was not asked"
    )


def run(arguments: argparse.Namespace) -> int:
    orphans = find_orphans()
    if arguments.yes:
        end_orphans(orphans)  # first: it raises if something cannot be removed
    for line in orphans.lines:
        print(("removed: " if arguments.yes else "left: ") + line)
    if orphans.docker_error and arguments.verbose:
        print(f"docker was not asked: {orphans.docker_error}", file=sys.stderr)
    if not orphans.lines:
        print("nothing is left")
    elif not arguments.yes:
        print("vllm-repro clean --yes removes it")
    return 0
