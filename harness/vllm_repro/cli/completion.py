"""`vllm-repro completion`: shell completion of verbs, options, scenarios and arms."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import argcomplete
from argcomplete.shell_integration import shellcode

from vllm_repro.cli.common import add_common, use_scenario_folders
from vllm_repro.errors import ReproError
from vllm_repro.scenario.catalogue import find, scenario_ids

_EPILOG = """

In ~/.bashrc, or with zsh in ~/.zshrc:
  eval "$(vllm-repro completion bash)\""""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `vllm-repro completion` to its parser."""
    add_common(parser, example="vllm-repro completion bash", more=_EPILOG)
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to print it for")


def run(arguments: argparse.Namespace) -> int:
    """Print the completion script for a shell, and return 0."""
    print(shellcode(["vllm-repro"], shell=arguments.shell))
    return 0


def complete(parser: Callable[[str | None], argparse.ArgumentParser]) -> None:
    """Print the completions that the calling shell asks for, and exit.

    parser: returns the parser with the options of a verb.
    """
    words = os.environ["COMP_LINE"].split()
    argcomplete.autocomplete(
        parser(words[1] if len(words) > 1 else None), default_completer=_Values()
    )


class _Values(argcomplete.completers.FilesCompleter):
    """Completions of a value: scenarios and files for SCENARIO, arms for `--arm`, else files."""

    def __call__(self, prefix: str, **kwargs: Any) -> list[str]:
        action, arguments = kwargs["action"], kwargs["parsed_args"]
        use_scenario_folders(arguments)
        files: list[str] = super().__call__(prefix, **kwargs)
        try:
            if action.metavar == "SCENARIO":
                return [*scenario_ids(), *files]
            if action.dest == "arm":
                return [arm.name for arm in find(_scenario(arguments)).arms]
        except ReproError:  # a folder or a scenario that is not there
            return []
        return files


def _scenario(arguments: argparse.Namespace) -> str:
    """Return the first scenario that the words to complete name; empty if none is named yet."""
    named = getattr(arguments, "scenario", None) or getattr(arguments, "scenarios", None) or ""
    return named if isinstance(named, str) else named[0]
