"""Options that choose the server, for the verbs that boot it or print its command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_repro.cli.source_option import WITH_OPTION, exchanged, source
from vllm_repro.servers.kinds import kinds
from vllm_repro.servers.options import RANDOM_WEIGHTS, ServerOptions

_ALL = ("server", "url", "image", "vllm", "with", "model", "weights", "log", "patch")


def add_server_options(
    parser: argparse.ArgumentParser, names: Sequence[str] = _ALL, *, patch: str = ""
) -> None:
    """Add the options about servers in `names`, such as "vllm" for `--vllm`.

    patch: end of the help of `--patch`.
    """
    # Without --url nothing names the server that `attach` would use.
    offered = kinds(lambda facts: facts.started or "url" in names)
    texts = "; ".join(f"{kind}: {kind.facts.summary}" for kind in offered)
    options: dict[str, dict[str, Any]] = {
        "server": {
            "choices": ("auto", *offered),
            "default": "auto",
            "help": (
                "where the vLLM comes from (default: auto, which picks one and prints why):"
                f" {texts}"
            ),
        },
        "url": {
            "type": _without_v1,
            "metavar": "U",
            "help": "attach to the server that runs at this URL",
        },
        "image": {
            "metavar": "I",
            "help": "the image to run (default: the official one of the release)",
        },
        "vllm": {
            "type": source,
            "metavar": "SOURCE",
            "help": (
                "a release such as 0.23.0, which a process server or the lab installs into a cache;"
                " these also run a wheel file, a folder that holds vllm/, or a commit as in"
                " ~/vllm@abc123"
            ),
        },
        "with": WITH_OPTION,
        "model": {
            "metavar": "M",
            "help": "a model folder or name instead of the scenario's tiny model",
        },
        "weights": {
            "choices": ("real", *RANDOM_WEIGHTS),
            "help": (
                "real: the model's own; random: all its layers, without a download of weights;"
                " dummy: random ones of a tiny model with the same attention"
            ),
        },
        "log": {
            "type": Path,
            "metavar": "FILE",
            "help": "the log of an attached server, if it is not found automatically",
        },
        "patch": {
            "type": Path,
            "action": "append",
            "metavar": "FILE",
            "help": (
                "a unified diff of vLLM to apply to the image or release: what git diff prints in a"
                " checkout of vLLM" + patch
            ),
        },
    }
    group = parser.add_argument_group("server")
    for name in names:
        group.add_argument(f"--{name}", **options[name])


def _without_v1(text: str) -> str:
    """Return a URL without `/v1` and final slashes; it is not checked here."""
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def server_options(arguments: argparse.Namespace) -> ServerOptions:
    """Return the `ServerOptions` of a parsed command line."""
    named = {
        name: getattr(arguments, name)
        for name in _ALL
        if getattr(arguments, name, None) is not None
    }
    if packages := named.pop("with", None):
        named["vllm"] = exchanged(named.get("vllm"), packages)
    return ServerOptions(**named | {"patch": tuple(named.get("patch", ()))})
