"""What the verbs that go on with something share: it is gone on with as it was begun."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Collection, Sequence

from vllm_repro.errors import UsageError

__all__ = ["as_begun"]


def as_begun(
    arguments: argparse.Namespace, named: Sequence[str], words: Sequence[str], *, beside: Collection[str] = ()
) -> argparse.Namespace:
    """What `words` ask for, and from this call how its result is printed.

    named: what this call names. beside: the options that it may have next to `--resume`. Raises `UsageError` where it has others.
    """
    parser: argparse.ArgumentParser = arguments.parser
    bare = vars(parser.parse_args([*named, "--resume", str(arguments.resume)]))
    free = {"json", "verbose", *beside}
    given = [name for name, value in bare.items() if name not in free and value != getattr(arguments, name)]
    if given:
        raise UsageError(
            f"--resume goes on as it was begun, and --{given[0].replace('_', '-')} would change it",
            hint=shlex.join([*parser.prog.split(), "--resume", str(arguments.resume)]),
        )
    begun = parser.parse_args(list(words))
    begun.json, begun.verbose = arguments.json, arguments.verbose
    return begun
