"""`vllm-repro clean`: processes and containers that a killed run left, and the cached releases."""

from __future__ import annotations

import argparse
import sys

from vllm_repro.cli.common import add_common
from vllm_repro.releases.disk import human_size
from vllm_repro.releases.provision import ReleaseCache
from vllm_repro.servers.orphans import end_orphans, find_orphans


def add(parser: argparse.ArgumentParser) -> None:
    add_common(parser, example="vllm-repro clean --yes")
    parser.add_argument("--yes", action="store_true", help="remove instead of listing")
    parser.add_argument("--envs", action="store_true", help="the cached vLLM releases instead")


def run(arguments: argparse.Namespace) -> int:
    if arguments.envs:
        return _environments(remove=arguments.yes)
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


def _environments(*, remove: bool) -> int:
    cache = ReleaseCache()
    cached = cache.cached()
    for release in cached:
        print(f"vLLM {release.version}, torch {release.torch}: {human_size(release.size)}")
    size = cache.size()
    if not size:
        print(f"no release is cached in {cache.root}")
    elif remove:
        print(f"removed {human_size(cache.remove_all(lambda text: print(text, file=sys.stderr)))}")
    else:
        print(
            f"{human_size(size)} in {cache.root}, shared files counted once; vllm-repro clean --envs --yes removes it"
        )
    return 0
