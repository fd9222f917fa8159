"""`vllm-repro clean`: processes and containers that a killed run left."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vllm_repro.cli.common import add_common
from vllm_repro.host.lease import TEMPORARY
from vllm_repro.host.processes import sessions_writing_to
from vllm_repro.servers.orphans import end_orphans, find_orphans


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vllm-repro clean` to its parser."""
    add_common(parser, example="vllm-repro clean --yes", scenarios=False)
    parser.add_argument("--yes", action="store_true", help="remove instead of listing")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="also print why Docker was not asked"
    )


def _kept_logs() -> Iterator[Path]:
    """Yield the logs that Python programs with `VllmServer` left in the temp folder.

    A program leaves its log if the engine died, or if the program was killed. Logs of other users,
    and logs that a process still writes, are left out.
    """
    for log in sorted(Path(tempfile.gettempdir()).glob(f"{TEMPORARY}*/logs/server-1.log")):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            facts = log.stat()
            if facts.st_uid == os.getuid() and not sessions_writing_to(
                (facts.st_dev, facts.st_ino)
            ):
                yield log


def run(arguments: argparse.Namespace) -> int:
    """List what killed runs left on this host, remove it with `--yes`, and return 0.

    The logs of dead servers are only listed. Raises `InfraError` if something cannot be removed.
    """
    orphans = find_orphans()
    if arguments.yes:
        end_orphans(orphans)  # first: it raises if something cannot be removed
    for line in orphans.lines:
        print(("removed: " if arguments.yes else "left: ") + line)
    if orphans.docker_error and arguments.verbose:
        print(f"docker was not asked: {orphans.docker_error}", file=sys.stderr)
    logs = list(_kept_logs())
    for log in logs:
        print(
            "kept: the log of a server whose engine died or whose program was killed, in"
            f" {log.parents[1]}; rm -r removes it"
        )
    if not orphans.lines and not logs:
        print("nothing is left")
    elif orphans.lines and not arguments.yes:
        print("vllm-repro clean --yes removes it")
    return 0
