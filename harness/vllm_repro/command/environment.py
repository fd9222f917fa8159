"""Check of the environment variables of a reported command, and of flags that load code or files.

The command may come from a stranger and its server runs on this host. `LD_PRELOAD`,
`PYTHONWARNINGS` or `PATH` would run the stranger's code. So would a library or a cache at a path
that the stranger chose.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from vllm_repro.command.flags import Flag
from vllm_repro.secret_names import is_secret_name, steers_vllm

_NAMES_A_PATH = re.compile(r"_(?:DIR|DIRECTORY|FILE|HOME|LIB|LIBRARY|PATH|PLUGIN|ROOT)$")
_CALLS_OUT = re.compile(r"^(?:HF_ENDPOINT|RAY_ADDRESS|RAY_RUNTIME_ENV_HOOK)$")
"""Variables that name a machine of the reporter's choice, or a function to call.

The caller's token or the engine would go to that machine.
"""
_LOADS = re.compile(
    r"--(?:chat-template|config|io-processor-plugin|logits-processors|middleware"
    r"|reasoning-parser-plugin|scheduler-cls|tool-parser-plugin|trust-remote-code|worker-cls"
    r"|worker-extension-cls)"
)
_A_PATH = re.compile(r"(?:^|[=\s\"'])(?:~|\.{0,2}/)|\.\./|module_path")


def variable_mistakes(variables: Iterable[tuple[str, str]]) -> list[str]:
    """Return a message for each (name, value) that must not be set on this host.

    Allowed: switches and numbers of vLLM and its libraries (`VLLM_…`, `NCCL_…`), URLs, and secrets,
    whose values come from the caller.
    """
    mistakes = []
    for name, value in variables:
        if is_secret_name(name):
            continue
        if not steers_vllm(name):
            mistakes.append(f"{name} is not a variable of vLLM or its libraries: remove it")
        elif _CALLS_OUT.match(name):
            mistakes.append(
                f"{name} connects this host to one of the reporter's choice: remove it, or set it"
                " yourself"
            )
        elif _NAMES_A_PATH.search(name) or (
            "/" in value and not value.startswith(("http://", "https://"))
        ):
            mistakes.append(f"{name} names a path on the reporter's machine: remove it")
    return mistakes


def loading_flags(flags: Iterable[Flag]) -> list[str]:
    """Return, with values, the flags by which vLLM loads code or uses files of this host.

    They are allowed, but shown to the user.
    """
    return [
        " ".join(flag.words())
        for flag in flags
        if _LOADS.fullmatch(flag.name) or _A_PATH.search(flag.text or "")
    ]
