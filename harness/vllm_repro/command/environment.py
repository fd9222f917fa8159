"""Check of the environment variables in front of a reported command.

They are set for a server on this host, and the command may come from a stranger. `LD_PRELOAD`, `PYTHONWARNINGS` or `PATH` would run the
stranger's code, as would a library or a cache at a path of the stranger's choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from vllm_repro.secret_names import is_secret_name, steers_vllm

__all__ = ["variable_mistakes"]

_NAMES_A_PATH = re.compile(r"_(?:DIR|DIRECTORY|FILE|HOME|LIB|LIBRARY|PATH|PLUGIN|ROOT)$")


def variable_mistakes(variables: Iterable[tuple[str, str]]) -> list[str]:
    """Return a message for each (name, value) that must not be set on this host.

    Allowed: switches and numbers of vLLM and its libraries (`VLLM_…`, `NCCL_…`), URLs, and secrets, whose values come from the caller.
    """
    mistakes = []
    for name, value in variables:
        if is_secret_name(name):
            continue
        if not steers_vllm(name):
            mistakes.append(f"{name} is not a variable of vLLM or its libraries: remove it")
        elif _NAMES_A_PATH.search(name) or ("/" in value and not value.startswith(("http://", "https://"))):
            mistakes.append(f"{name} names a path on the reporter's machine: remove it")
    return mistakes
